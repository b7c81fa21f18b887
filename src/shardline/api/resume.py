"""A request that goes on where another engine, or another server, has left it: its output so far, and its seed."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from shardline.api.outputs import RequestOutput
from shardline.messages.request import Constraints, SequenceOutput, TokenLogprobs
from shardline.sampling_params import SamplingParams

UNKNOWN_SCORE = TokenLogprobs(0.0, 1, [], [])
"""In place of the log probabilities of tokens that were reported elsewhere."""


class ChoiceSoFar(msgspec.Struct, forbid_unknown_fields=True):
    """What has been reported of a choice."""

    token_ids: list[int] = []
    finished: bool = False
    digests: list[Annotated[str, Meta(max_length=64)]] | msgspec.UnsetType = msgspec.UNSET
    """Of the logits of all tokens, if the request wants a receipt."""

    def as_step(self) -> SequenceOutput:
        """The same as the output of one step."""
        count = len(self.token_ids)
        return SequenceOutput("", self.token_ids, [UNKNOWN_SCORE] * count, self.digests or [""] * count)


class PromptSoFar(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What has been reported of all choices of a prompt."""

    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    """The seed that was given, or drawn."""
    request: Annotated[str, Meta(max_length=64)]
    """`request_digest` where the request began."""
    choices: list[ChoiceSoFar]
    num_cached_tokens: Annotated[int, Meta(ge=0)] | None = None
    """What the usage says; None: nothing has been reported."""

    def check(self, params: SamplingParams, vocab_size: int) -> None:
        """Refuse an output that a request with these parameters cannot have.

        Raises:
            ValueError: the message says what is wrong.
        """
        if len(self.choices) != params.n:
            raise ValueError(f"resume has {len(self.choices)} choices of a prompt with n={params.n}")
        for choice in self.choices:
            if any(not 0 <= token_id < vocab_size for token_id in choice.token_ids):
                raise ValueError(f"resume has a token id outside of the vocabulary, which has {vocab_size} tokens")
            if len(choice.digests or ()) != (len(choice.token_ids) if params.receipt else 0):
                raise ValueError("resume has digests that are not those of its tokens")
            left = (params.max_tokens or 0) - len(choice.token_ids)
            if left < (0 if choice.finished else 1):
                raise ValueError("resume has a choice with more tokens than the request may generate")


def copy_reported(output: RequestOutput, params: SamplingParams) -> RequestOutput:
    """An output that was reported elsewhere. It stays as it is when the output grows."""
    choices = [msgspec.structs.replace(choice, token_ids=list(choice.token_ids)) for choice in output.outputs]
    scores = None if params.prompt_logprobs is None else [UNKNOWN_SCORE] * (len(output.prompt_token_ids) - 1)
    return msgspec.structs.replace(output, outputs=choices, prompt_token_logprobs=scores)


def request_digest(
    prompt_token_ids: list[int],
    params: SamplingParams,
    constraints: Constraints | None,
    shown_token_ids: frozenset[int],
    cache_salt: str,
) -> str:
    """64 hex digits over all that an output depends on besides the numeric contract.

    Servers may differ in templates, lengths and defaults; then equal bodies are unlike requests.
    """
    own = msgspec.structs.replace(params, structured_outputs=None)  # the constraints have its grammar
    parts = (prompt_token_ids, own, constraints, sorted(shown_token_ids), cache_salt)
    return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()
