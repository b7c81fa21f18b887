"""Where two answers to one prompt first differ, and what that tells about the endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardline.compare.answers import Answer, Token

Cause = Literal["tie", "rounding", "draw", "model", "end", "unknown"]

CAUSES: dict[Cause, str] = {
    "tie": "a tie: both endpoints find both tokens equally likely",
    "rounding": "rounding: the two tokens are closer than the endpoints' probabilities agree",
    "draw": "another draw: the probabilities agree, the random numbers do not",
    "model": "another model, prompt or precision: the probabilities differ",
    "end": "one answer ends here, and the probabilities agree so far",
    "unknown": "unknown: there are no log probabilities",
}

TIE = 1e-4
"""Natural logarithms of two probabilities that are nearer than this count as equal."""
SAME_MODEL = 0.1
"""The most by which log probabilities of the same weights differ between two implementations: bfloat16 keeps 8 bits of
a number, so logits of about 20 are uncertain by 0.08."""


@dataclass(frozen=True)
class Side:
    """One endpoint at the first difference."""

    token: str | None
    """None: the answer has ended."""
    logprob: float | None
    """Of its own token; None: not known."""
    other_logprob: float | None
    """Of the other endpoint's token; None: not known, or not among the likeliest."""

    @property
    def gap(self) -> float | None:
        """How far the two tokens' log probabilities are apart; None: not known."""
        if self.logprob is None or self.other_logprob is None:
            return None
        return abs(self.logprob - self.other_logprob)


@dataclass(frozen=True)
class Difference:
    """The first position at which two answers differ, in tokens, or in characters if tokens are not known."""

    position: int
    before: str
    """The end of the text that both have."""
    a: Side
    b: Side
    cause: Cause


def deviation(a: Answer, b: Answer, count: int) -> float | None:
    """The largest difference of a token's log probability at the first `count` positions, where both answers have the
    same context; None: not known."""
    if not (a.has_logprobs and b.has_logprobs):
        return None
    pairs = list(zip(a.tokens, b.tokens, strict=False))[:count]
    return max((_distance(mine.top, theirs.top) for mine, theirs in pairs), default=0.0)


def first_difference(a: Answer, b: Answer, *, greedy: bool) -> Difference | None:
    """None: the answers are equal. Both must be whole."""
    if not (a.has_logprobs and b.has_logprobs):
        return _in_text(a.text, b.text)
    texts_a, texts_b = ([token.text for token in answer.tokens] for answer in (a, b))
    if texts_a == texts_b:
        return None
    common = zip(texts_a, texts_b, strict=False)
    place = next((i for i, (x, y) in enumerate(common) if x != y), min(len(texts_a), len(texts_b)))
    mine, theirs = (answer.tokens[place] if place < len(answer.tokens) else None for answer in (a, b))
    sides = _side(mine, theirs), _side(theirs, mine)
    apart = deviation(a, b, place + 1) or 0.0
    before = "".join(texts_a[max(0, place - 12) : place])
    return Difference(place, before, *sides, _cause(*sides, apart, greedy=greedy))


def _distance(mine: Mapping[str, float], theirs: Mapping[str, float]) -> float:
    """How far the log probabilities of the tokens that both name are apart; infinite if both name others."""
    shared = mine.keys() & theirs.keys()
    if not shared and mine and theirs:
        return float("inf")
    return max((abs(mine[token] - theirs[token]) for token in shared), default=0.0)


def _side(mine: Token | None, theirs: Token | None) -> Side:
    if mine is None:
        return Side(None, None, None)
    return Side(mine.text, mine.logprob, None if theirs is None else mine.top.get(theirs.text))


def _cause(a: Side, b: Side, apart: float, *, greedy: bool) -> Cause:
    if apart > SAME_MODEL:
        return "model"
    if a.token is None or b.token is None:
        return "end"
    if a.gap is not None and b.gap is not None:
        if max(a.gap, b.gap) <= TIE:
            return "tie"
        if greedy and max(a.gap, b.gap) <= 2 * apart:
            return "rounding"  # each side's own order of the two is within what both disagree about
    return "model" if greedy else "draw"


def _in_text(a: str, b: str) -> Difference | None:
    if a == b:
        return None
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    sides = [Side(text[place : place + 12] or None, None, None) for text in (a, b)]
    return Difference(place, a[max(0, place - 40) : place], sides[0], sides[1], "unknown")
