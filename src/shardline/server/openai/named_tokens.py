"""How likely the next token after a prompt is each of some that are named: a request for one token."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.api.logprob_counts import MAX_NAMED_LOGPROBS
from shardline.api.outputs import RequestOutput
from shardline.sampling_params import SamplingParams

MAX_NAMED = MAX_NAMED_LOGPROBS
"""The most tokens that one request may name."""


def naming_params(token_ids: Sequence[int]) -> SamplingParams:
    """The parameters of a request whose output `named_logprobs` reads.

    Nothing is drawn, and no mark changes the logits.
    """
    return SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=token_ids, watermarking=False)


def named_logprobs(output: RequestOutput) -> dict[int, float]:
    """The log probabilities of the named tokens as the next one; they count all tokens.

    The likeliest token is there, too, since it is the output.
    """
    entries = output.outputs[0].token_logprobs
    assert entries, "a finished output has them if they were asked for"
    return dict(zip(entries[0].top_ids, entries[0].top_logprobs, strict=True))
