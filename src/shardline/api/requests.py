"""User requests become engine requests: prompts become ids, and unset parameters get values."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import msgspec

from shardline.messages.request import Constraints, Request
from shardline.sampling_params import SamplingParams
from shardline.text.tokenizer import Tokenizer

MAX_CHOICES_PER_REQUEST = 1024
"""Largest `n`: each choice is a request of its own in the engine. HTTP clients may ask for fewer."""
MAX_STOP_STRINGS = 1024

MAX_STOP_CHARS = 65_536
"""The most characters of all stop strings together: every choice builds its own tables of them."""
MAX_BAD_WORDS = 256
MAX_SALT_CHARS = 1024
_WIRE_ENCODER = msgspec.msgpack.Encoder()
_WIRE_DECODER = msgspec.msgpack.Decoder(SamplingParams)


class ContextLengthExceeded(ValueError):
    """The prompt leaves no room for output (HTTP 400, code context_length_exceeded)."""


class QueueFull(Exception):
    """Too many requests are waiting; the client should try again later (HTTP 429)."""


class EngineDead(RuntimeError):
    """No replica is left to run the request (HTTP 503); the message says why."""


class EngineRecovering(RuntimeError):
    """Every replica has failed, and at least one restarts; the client should try again later (HTTP 503)."""


class EngineDraining(RuntimeError):
    """The engine finishes its requests and accepts no new ones (HTTP 503)."""


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; `prompt` is their text, for display only."""

    prompt_token_ids: Sequence[int]
    prompt: str


Prompt = str | TextPrompt | TokensPrompt | Sequence[int]


@dataclass(frozen=True)
class PreparedRequest:
    """A checked user request; `children` are its n choices as engine requests, which differ only in `choice`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    children: list[Request]
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens that are part of the text even if others are skipped."""


@dataclass(frozen=True)
class RequestBuilder:
    """Checks prompts and parameters against one model, and fills in unset parameters.

    Args:
        tokenizer: None if the model has no tokenizer; then prompts must be token ids.
        vocab_size: rows of the embedding; every token id is smaller.
        max_model_len: longest prompt and output together, in tokens.
        seeds: generates a seed for each request that sets none.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    seeds: random.Random

    def build_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        streamed: bool = True,
        grammar: str = "",
    ) -> PreparedRequest:
        """Encode and check a request; `streamed`: whether its user reads the tokens as they come.

        `grammar`: see `build_from_ids`.

        Raises:
            ContextLengthExceeded: the prompt is longer than the model supports.
            ValueError: the prompt or a parameter does not fit the model; the message says what would.
        """
        text, ids = split_prompt(prompt)
        if ids is None:
            assert text is not None
            ids = self.require_tokenizer().encode_text(text)
        return self.build_from_ids(
            request_id,
            text,
            ids,
            params,
            priority=priority,
            cache_salt=cache_salt,
            streamed=streamed,
            grammar=grammar,
        )

    def build_from_ids(
        self,
        request_id: str,
        text: str | None,
        ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        streamed: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
        grammar: str = "",
    ) -> PreparedRequest:
        """As `build_request`, for an encoded prompt; `text` is for display only.

        `shown_token_ids`: special tokens that are part of the text even if others are skipped. `grammar`: the
        output's, which `structured.checks` has written or taken; empty: there is none.
        """
        self._check_prompt(ids)
        self._check_params(params)
        if not -(2**63) <= priority < 2**63:
            raise ValueError("priority must fit in 64 bits")
        if len(cache_salt) > MAX_SALT_CHARS:
            raise ValueError(f"cache_salt must have at most {MAX_SALT_CHARS} characters, got {len(cache_salt)}")
        room = self.max_model_len - len(ids)
        if params.min_tokens > room:
            raise ValueError(
                f"min_tokens is {params.min_tokens}, but a prompt of {len(ids)} tokens leaves room for {room} "
                f"(the model's maximum length is {self.max_model_len})"
            )
        params = msgspec.structs.replace(
            params,
            seed=self.seeds.getrandbits(63) if params.seed is None else params.seed,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            top_k=0 if params.top_k >= self.vocab_size else params.top_k,
            stop_token_ids=tuple(dict.fromkeys(params.stop_token_ids)),
        )
        sampling = _engine_params(params)
        constraints = self._make_constraints(params, grammar)
        arrival = time.monotonic()
        children = [
            Request(
                request_id=f"{request_id}-{choice}",
                prompt_token_ids=ids,
                # All choices have the same prompt, so one of them reports its log probabilities.
                sampling=msgspec.structs.replace(sampling, prompt_logprobs=None) if choice else sampling,
                choice=choice,
                eos_token_ids=self.eos_token_ids,
                priority=priority,
                arrival_time=arrival,
                cache_salt=cache_salt,
                constraints=constraints,
                # The front finds stop strings, so it must see every token at once.
                streamed=streamed or bool(params.stop_strings),
            )
            for choice in range(params.n)
        ]
        return PreparedRequest(request_id, text, ids, params, children, shown_token_ids)

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, for a prompt that is text.

        Raises:
            ValueError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer.json; give prompt_token_ids instead of text")
        return self.tokenizer

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise ValueError("the prompt is empty (decoder prompt cannot be empty); it needs at least one token")
        if len(ids) >= self.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(ids)} tokens, but the model's maximum context length is {self.max_model_len} "
                "tokens, prompt and output together; shorten the prompt or raise --max-model-len"
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(token_id for token_id in ids if not 0 <= token_id < self.vocab_size)
            raise ValueError(f"token id {bad} is out of vocabulary: it has {self.vocab_size} tokens")

    def _make_constraints(self, params: SamplingParams, grammar: str) -> Constraints | None:
        """The constraints on the output's tokens; None: there are none."""
        bad_words: list[tuple[int, ...]] = []
        if grammar or params.bad_words:
            tokenizer = self._tokenizer_for_constraints()
            for word in params.bad_words or ():
                bad_words += (tuple(tokenizer.encode_text(text, False)) for text in (word, " " + word.lstrip()))
        allowed = tuple(params.allowed_token_ids or ())
        if not (grammar or allowed or bad_words):
            return None
        return Constraints(grammar, allowed, tuple(dict.fromkeys(word for word in bad_words if word)))

    def _tokenizer_for_constraints(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("structured_outputs and bad_words need a tokenizer, and the model has none")
        return self.tokenizer

    def _check_params(self, params: SamplingParams) -> None:
        if params.n > MAX_CHOICES_PER_REQUEST:
            raise ValueError(f"n must be at most {MAX_CHOICES_PER_REQUEST}, got {params.n}")
        stops = params.stop_strings
        if len(stops) > MAX_STOP_STRINGS or sum(map(len, stops)) > MAX_STOP_CHARS:
            raise ValueError(
                f"stop must have at most {MAX_STOP_STRINGS} strings, and {MAX_STOP_CHARS} characters in all of them; "
                f"it has {len(stops)} and {sum(map(len, stops))}"
            )
        if len(params.bad_words or ()) > MAX_BAD_WORDS or sum(map(len, params.bad_words or ())) > MAX_STOP_CHARS:
            raise ValueError(
                f"bad_words must have at most {MAX_BAD_WORDS} texts, and {MAX_STOP_CHARS} characters in all of them"
            )
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            for token_id in ids:
                if not 0 <= token_id < self.vocab_size:
                    raise ValueError(f"{name} has token id {token_id}, but the vocabulary has {self.vocab_size} tokens")
        if stops and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model has none; use stop_token_ids")


def _engine_params(params: SamplingParams) -> SamplingParams:
    """`params` as the engine will decode them, without what the front finds (stop strings) or translates (constraints).

    Parameters that cannot be sent must be refused here, where they harm no other request.
    """
    own = msgspec.structs.replace(params, stop=(), structured_outputs=None, allowed_token_ids=None, bad_words=None)
    try:
        return _WIRE_DECODER.decode(_WIRE_ENCODER.encode(own))
    except (msgspec.MsgspecError, OverflowError, TypeError) as error:
        raise ValueError(f"the sampling parameters are invalid: {error}") from error


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list. A string, an object or a list of ids is one prompt."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def split_prompt(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """The text and the ids in a prompt; at least one of them is not None.

    Raises:
        ValueError: the prompt has none of the known forms.
    """
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if not unknown and (text is None or isinstance(text, str)):
            if ids is not None:
                return text, _as_ids(ids)
            if text is not None:
                return text, None
    elif isinstance(prompt, Sequence):
        return None, _as_ids(prompt)
    raise ValueError('a prompt is text, {"prompt": text}, {"prompt_token_ids": ids} or a list of ids')


def _as_ids(values: Any) -> list[int]:
    ids = list(values) if isinstance(values, Sequence) and not isinstance(values, (str, bytes)) else None
    if ids is None or not set(map(type, ids)) <= {int}:
        raise ValueError("prompt token ids must be a list of integers")
    return ids
