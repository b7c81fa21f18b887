"""User requests become engine requests: prompts become ids, and unset parameters get values."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import msgspec

from shardline.api.errors import ContextLengthExceeded, RequestDiffers
from shardline.api.logprob_counts import LogprobCounts
from shardline.api.prompt_embeds import embeds_digest
from shardline.api.prompts import EncodedPrompt, Prompt, read_prompt
from shardline.api.resume import ChoiceSoFar, PromptSoFar, request_digest
from shardline.deployment.fingerprint import NumericContract
from shardline.messages.request import AdapterRef, Constraints, PromptEmbeds, Request
from shardline.sampling_params import RequestOutputKind, SamplingParams
from shardline.text.tokenizer import Tokenizer

MAX_CHOICES_PER_REQUEST = 1024
"""Largest `n`: each choice is a request of its own in the engine. HTTP clients may ask for fewer."""
MAX_STOP_STRINGS = 1024
MAX_STOP_CHARS = 65_536
"""The most characters of all stop strings together: every choice builds its own tables of them."""
MAX_BAD_WORDS = 256
MAX_SALT_CHARS = 1024
request_owner: ContextVar[str] = ContextVar("request_owner", default="")
"""`Request.owner` of the requests that a task makes."""
_EMBEDS_SALT = "prompt_embeds".ljust(MAX_SALT_CHARS + 1)
"""Begins the salts of prompts with rows: those of users are shorter, so none of them names the same prefixes."""
ADAPTER_SALT = "adapter".ljust(MAX_SALT_CHARS + 1)
"""Begins the salts of prompts that an adapter computes, in the same way."""
_WIRE_ENCODER = msgspec.msgpack.Encoder()
_WIRE_DECODER = msgspec.msgpack.Decoder(SamplingParams)


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
    so_far: PromptSoFar | None = None
    """What has been reported elsewhere; None: it begins here."""
    contract: NumericContract | None = None
    """Under which it runs; None: nobody wants a receipt."""

    def origin(self) -> PromptSoFar:
        """What another server needs to go on with it, without the output so far."""
        first = self.children[0]
        digest = request_digest(
            self.prompt_token_ids, self.params, first.constraints, self.shown_token_ids, first.cache_salt
        )
        return PromptSoFar(first.sampling.seed or 0, digest, [ChoiceSoFar() for _ in self.children])


@dataclass(frozen=True)
class RequestBuilder:
    """Checks prompts and parameters against one model, and fills in unset parameters.

    Args:
        tokenizer: None if the model has no tokenizer; then prompts must be token ids.
        vocab_size: rows of the embedding; every token id is smaller.
        max_model_len: longest prompt and output together, in tokens.
        seeds: generates a seed for each request that sets none.
        max_logprobs: the most log probabilities at each token; -1: the whole vocabulary.
        embeds_size: numbers in a row of prompt_embeds; 0: the model takes none.
        takes_embeds: whether prompts may have such rows.
        has_watermark: whether the engine has a key with which it marks outputs.
        contract: the engine's; None: it makes no receipts.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    seeds: random.Random
    max_logprobs: int = 20
    embeds_size: int = 0
    takes_embeds: bool = False
    has_watermark: bool = False
    contract: NumericContract | None = None

    def build_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        streamed: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
        grammar: str = "",
        adapter: AdapterRef | None = None,
        so_far: PromptSoFar | None = None,
    ) -> PreparedRequest:
        """Encode and check a request; `streamed`: whether its user reads the tokens as they come.

        `shown_token_ids`: special tokens that are part of the text even if others are skipped. `adapter`: what changes
        the model; None: nothing does. `grammar`: the output's, which `structured.checks` has written or taken; empty:
        there is none. `so_far`: the output goes on after this.

        Raises:
            ContextLengthExceeded: the prompt is longer than the model supports.
            RequestDiffers: where it began, it was another request.
            ValueError: the prompt or a parameter does not fit the model; the message says what would.
        """
        if not isinstance(prompt, EncodedPrompt):
            given = read_prompt(prompt, self.embeds_size, takes_embeds=self.takes_embeds)
            if isinstance(given, str):
                given = EncodedPrompt(self.require_tokenizer().encode_text(given), text=given)
            prompt = given
        ids, embeds = prompt.token_ids, prompt.embeds
        if embeds is not None and (params.prompt_logprobs, params.truncate_prompt_tokens) != (None, None):
            raise ValueError("prompt_logprobs and truncate_prompt_tokens are not compatible with prompt_embeds")
        if (count := params.truncate_prompt_tokens) is not None:
            ids = ids[-(self.max_model_len - 1 if count == -1 else count) :]  # -1: the most that leave room for output
        self.check_prompt(ids)
        self.check_params(params)
        if params.receipt:
            self._check_receipt(embeds)
        if not (isinstance(priority, int) and -(2**63) <= priority < 2**63):
            raise ValueError("priority must be a whole number that fits in 64 bits")
        if len(cache_salt) > MAX_SALT_CHARS:
            raise ValueError(f"cache_salt must have at most {MAX_SALT_CHARS} characters, got {len(cache_salt)}")
        if embeds is not None:
            cache_salt = _EMBEDS_SALT + embeds_digest(embeds) + cache_salt
        if adapter is not None:
            cache_salt = ADAPTER_SALT + adapter.digest + cache_salt
        room = self.max_model_len - len(ids)
        if params.min_tokens > room:
            raise ValueError(
                f"min_tokens is {params.min_tokens}, but a prompt of {len(ids)} tokens leaves room for {room} "
                f"(the model's maximum length is {self.max_model_len})"
            )
        counts: dict[str, int | None] = {}
        if (params.logprobs, params.prompt_logprobs, params.logprob_token_ids) != (None, None, None):
            counts = self.logprob_counts.count_all(params, len(ids), room)
        seed = params.seed if so_far is None else so_far.seed
        params = msgspec.structs.replace(
            params,
            seed=self.seeds.getrandbits(63) if seed is None else seed,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            top_k=0 if params.top_k >= self.vocab_size else params.top_k,
            stop_token_ids=tuple(dict.fromkeys(params.stop_token_ids)),
            watermarking=True if self.has_watermark and params.watermarking is not False else None,
            **counts,
        )
        sampling = _engine_params(params)
        constraints = None
        if grammar or params.bad_words or params.allowed_token_ids:
            constraints = self._make_constraints(params, grammar)
        known: list[list[int]] = [[] for _ in range(params.n)]
        if so_far is not None:
            so_far.check(params, self.vocab_size)
            if so_far.request != request_digest(ids, params, constraints, shown_token_ids, cache_salt):
                raise RequestDiffers("resume is of another request: prompt, parameters or defaults are unlike here")
            known = [choice.token_ids for choice in so_far.choices]
        # All choices have the same prompt, so one of them reports its log probabilities: the first one without output.
        scored = next((choice for choice, token_ids in enumerate(known) if not token_ids), None)
        arrival = time.monotonic()
        children = [
            Request(
                request_id=f"{request_id}-{choice}",
                prompt_token_ids=ids,
                sampling=sampling if choice == scored else msgspec.structs.replace(sampling, prompt_logprobs=None),
                output_token_ids=known[choice],
                choice=choice,
                eos_token_ids=self.eos_token_ids,
                priority=priority,
                arrival_time=arrival,
                cache_salt=cache_salt,
                owner=request_owner.get(),
                constraints=constraints,
                embeds=embeds,
                adapter=adapter,
                # The front finds stop strings, so it must see every token at once.
                streamed=streamed or bool(params.stop_strings),
            )
            for choice in range(params.n)
        ]
        contract = self.contract if params.receipt else None
        return PreparedRequest(request_id, prompt.text, ids, params, children, shown_token_ids, so_far, contract)

    def _check_receipt(self, embeds: PromptEmbeds | None) -> None:
        if self.contract is None or self.contract.numerics.startswith("fast"):
            raise ValueError("receipt needs exact numerics: the bits of fast ones depend on the batch and the layout")
        if embeds is not None:
            raise ValueError("receipt is not compatible with prompt_embeds: it holds token ids only")

    @property
    def logprob_counts(self) -> LogprobCounts:
        """Counts the log probabilities that requests ask for."""
        return LogprobCounts(self.vocab_size, self.max_logprobs)

    async def encode_prompt(self, prompt: Prompt) -> EncodedPrompt:
        """The prompt as ids, without holding up the event loop for long.

        Raises:
            ValueError: the prompt has none of the known forms, or its tensor is refused.
        """
        if isinstance(prompt, EncodedPrompt):
            return prompt
        given = read_prompt(prompt, self.embeds_size, takes_embeds=self.takes_embeds)
        if isinstance(given, EncodedPrompt):
            return given
        return EncodedPrompt(await self.require_tokenizer().encode_text_async(given), text=given)

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, for a prompt that is text.

        Raises:
            ValueError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer.json; give prompt_token_ids instead of text")
        return self.tokenizer

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Refuse a prompt that leaves no room for output, or whose tokens the model does not have.

        Raises:
            ContextLengthExceeded, ValueError: see `build_request`.
        """
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
            if self.tokenizer is None:
                raise ValueError("structured_outputs and bad_words need a tokenizer, and the model has none")
            for word in params.bad_words or ():
                bad_words += (tuple(self.tokenizer.encode_text(text, False)) for text in (word, " " + word.lstrip()))
        allowed = tuple(params.allowed_token_ids or ())
        if not (grammar or allowed or bad_words):
            return None
        return Constraints(grammar, allowed, tuple(dict.fromkeys(word for word in bad_words if word)))

    def check_params(self, params: SamplingParams) -> None:
        """Refuse parameters that do not fit the model.

        Raises:
            ValueError: the message says what would fit.
        """
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
            ("logprob_token_ids", params.logprob_token_ids or ()),
        ):
            check_vocabulary(name, ids, self.vocab_size)
        if params.watermarking and not self.has_watermark:
            raise ValueError(
                "watermarking (or watermark) asks for a mark, and the engine has no key to mark answers with: leave it "
                "out, or start the engine with --watermark-config (see docs/watermark.md)"
            )
        if stops and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model has none; use stop_token_ids")


def check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuse token ids that the parameter `name` has, and the vocabulary has not.

    Raises:
        ValueError: the message names one.
    """
    for token_id in token_ids:
        if not (isinstance(token_id, int) and 0 <= token_id < vocab_size):
            raise ValueError(f"{name} has token id {token_id!r}, but the vocabulary has {vocab_size} tokens")


def _engine_params(params: SamplingParams) -> SamplingParams:
    """`params` as the engine will decode them, without what the front finds (stop strings) or translates (constraints).

    Parameters that cannot be sent must be refused here, where they harm no other request.
    """
    own = msgspec.structs.replace(
        params,
        stop=(),
        structured_outputs=None,
        allowed_token_ids=None,
        bad_words=None,
        truncate_prompt_tokens=None,
        detokenize=True,
        output_kind=RequestOutputKind.CUMULATIVE,
        logits_digest=params.logits_digest or params.receipt,
        receipt=False,
    )
    try:
        return _WIRE_DECODER.decode(_WIRE_ENCODER.encode(own))
    except (msgspec.MsgspecError, OverflowError, TypeError) as error:
        raise ValueError(f"the sampling parameters are invalid: {error}") from error
