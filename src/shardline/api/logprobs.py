"""Log probabilities as users read them: by token id, with the tokens' texts."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shardline.messages.request import TokenLogprobs

Decode = Callable[[int], str | None]
"""The text of a token id; None: it is not known."""


class Logprob(msgspec.Struct, frozen=True):
    """How likely the model found a token at one position."""

    logprob: float
    rank: int
    """1: the token was the most likely one."""
    decoded_token: str | None


def logprobs_by_token(token_id: int, chosen: TokenLogprobs, decode: Decode) -> dict[int, Logprob]:
    """The log probabilities at one position by token id: first the token there, then the most likely ones."""
    entries = {token_id: Logprob(chosen.logprob, chosen.rank, decode(token_id))}
    ranks = chosen.top_ranks or range(1, len(chosen.top_ids) + 1)
    for rank, other, value in zip(ranks, chosen.top_ids, chosen.top_logprobs, strict=True):
        if other not in entries:
            entries[other] = Logprob(value, rank, decode(other))
    return entries


def decode_nothing(token_id: int) -> None:
    """The `Decode` of a model without a tokenizer."""
