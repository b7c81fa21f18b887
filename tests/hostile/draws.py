"""What the generators of hostile cases have in common: a case is determined by a seed, a kind and a number."""

from __future__ import annotations

import random
from typing import Any

PRIMES = (2, 3, 7, 97, 1009, 65_537, 999_983, 2_147_483_647, 1_000_000_007, 2**61 - 1)
NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 63, 127, 128, 129, 255, 4096, 65_535, 2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63,
    -(2**63), 2**64, 10**30, 10**300, 0.0, -0.0, 0.1, 1e-7, 1e-320, 1e308, -1e308, 1.5, 3.0000000000000004,
)  # fmt: skip
TEXTS = (
    "", " ", "a", "A b", "\0", "\n", "\r\n", "\x1b[31m", "\x7f", "é", "ß", "İ", "ﬁ", "e\u0301" * 3, "\u202e",
    "\ufeff", "\ufffe",
    "\u2028", "🙂", "👩‍👩‍👧‍👦", "\ud800", "\udfff x", "{{ 7 * 7 }}", "{% for %}", "<|begin|>", "<|end|>", "</s>",
    "%s%n", "%3000000000d",
    "../../etc/passwd", "'; --", '"', "\\", "\\u0000", "start", "$ref", "__class__", "constructor", "NaN", "null", "0x",
)  # fmt: skip
"""Two of them have halves of surrogate pairs, which JSON can spell and UTF-8 cannot."""


def draw(seed: int, kind: str, number: int) -> random.Random:
    """The random numbers of one case."""
    return random.Random(f"{seed}/{kind}/{number}")


def size(rng: random.Random, most: int) -> int:
    """A number from 1 to `most`. Its logarithm is uniform: most cases are small, and some are as large as can be."""
    return max(1, min(most, round(most ** rng.random())))


def number(rng: random.Random) -> Any:
    """A number that is odd, huge or on a border."""
    return rng.choice(NUMBERS)


def text(rng: random.Random, most: int = 200) -> str:
    """A text."""
    return rng.choice(TEXTS) * (1 if rng.random() < 0.7 else size(rng, most))


def value(rng: random.Random, depth: int = 3) -> Any:
    """A JSON value of any type."""
    kind = rng.randrange(9 if depth else 6)
    match kind:
        case 0:
            return rng.choice((None, True, False))
        case 1 | 2:
            return number(rng)
        case 3 | 4:
            return text(rng)
        case 5:
            return rng.choice(([], {}, [[]], [{}], {"": None}))
        case 6:
            return nested(rng.choice(("[]", "{}")), size(rng, 300))
        case 7:
            return [value(rng, depth - 1) for _ in range(size(rng, 12))]
        case _:
            return {text(rng, 3): value(rng, depth - 1) for _ in range(size(rng, 8))}


def nested(brackets: str, depth: int) -> Any:
    """Arrays or objects in each other."""
    inner: Any = [] if brackets == "[]" else {}
    for _ in range(depth):
        inner = [inner] if brackets == "[]" else {"a": inner}
    return inner
