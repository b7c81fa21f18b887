"""Hostile regular expressions."""

# ruff: noqa: UP031  braces are part of what is written here

from __future__ import annotations

import random
from collections.abc import Callable

from tests.hostile import draws

NAMED: dict[str, Callable[[], str]] = {
    "nested counts": lambda: "(a{1,1000}){1,1000}",
    "a state for every set of places": lambda: "(a|b)*a(a|b){24}",
    "19 letters in any order": lambda: "&".join(f"(.*{chr(97 + index)}.*)" for index in range(19)),
    "an overlapping alternation": lambda: "(a|ab|abc|b|bc|c)*d",
}

_ATOMS = (
    "a", "b", "ab", ".", "é", "🙂", r"\d", r"\w", r"\W", r"\s", r"\S", r"\p{L}", r"\p{Greek}", r"\P{Lu}",
    r"\x{1F600}", r"\u00e9",
    "[a-z]", "[^a]", "[^\\n\"]", "[a-zA-Z0-9_.-]", r"[\p{L}&&[^a-z]]", "[[:alpha:]]", "(?i)straße", "(?s).", r"\b",
    "^", "$", r"\A", r"\z",
)  # fmt: skip
_ODD = (
    "(", ")", "[", "]", "{", "a{", "a{2,1}", "*", "a**", "\\", "[z-a]", "(?", "(?=a)", "(?!a)", "(?<=a)", r"(a)\1",
    "(?P<n>a)(?P=n)",
    "a{99999999999999999999}", r"\x{110000}", r"\x{D800}", "\ud800", "\0", "(?#", "(?R)", "[[", r"\p{Nothing}", "",
    "a++", "a*?", "(?>a)",
)  # fmt: skip


def regex(rng: random.Random, depth: int = 3) -> str:
    """A regular expression."""
    if rng.random() < 0.3:
        return rng.choice(_SHAPES)(rng)
    expression = _drawn(rng, rng.randrange(depth + 1))
    if rng.random() < 0.1:
        place = rng.randrange(len(expression) + 1)
        expression = expression[:place] + rng.choice(_ODD) + expression[place:]
    return expression


def _drawn(rng: random.Random, depth: int) -> str:
    if depth <= 0:
        return rng.choice(_ATOMS)
    match rng.randrange(4):
        case 0:
            return "".join(_drawn(rng, depth - 1) for _ in range(draws.size(rng, 8)))
        case 1:
            return "(" + "|".join(_drawn(rng, depth - 1) for _ in range(draws.size(rng, 12))) + ")"
        case 2:
            return f"({_drawn(rng, depth - 1)}){_count(rng)}"
        case _:
            return f"(?:.*{_drawn(rng, depth - 1)}.*)"


def _count(rng: random.Random) -> str:
    least, most = draws.size(rng, 3000), draws.size(rng, 3000)
    return rng.choice(
        ("*", "+", "?", "{%d}" % least, "{%d,}" % least, "{%d,%d}" % (least, least + most), "{,%d}" % most)
    )


_SHAPES: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: "(" * (depth := draws.size(rng, 2000)) + "a" + ")" * depth,
    lambda rng: "(" * (depth := draws.size(rng, 12)) + "a" + "){1,%d}" % draws.size(rng, 1000) * depth,
    lambda rng: "(a|b)*a" + "(a|b)" * draws.size(rng, 40),
    lambda rng: "(a|b)*a(a|b){%d}" % draws.size(rng, 2000),
    lambda rng: "(" + "|".join("a" * index for index in range(1, draws.size(rng, 300) + 1)) + ")*b",
    lambda rng: "(" + "|".join(f"w{index}" for index in range(draws.size(rng, 1500))) + ")+",
    lambda rng: "".join(f"(.*{chr(97 + index % 26)})?" for index in range(draws.size(rng, 60))),
    lambda rng: "(a?){%d}a{%d}" % (count := draws.size(rng, 500), count),
    lambda rng: r"(\p{L}\p{M}*){%d,}" % draws.size(rng, 1000),
    lambda rng: r"[\p{L}\p{N}]{1,%d}" % draws.size(rng, 100_000),
    lambda rng: rng.choice(_ATOMS) * draws.size(rng, 4000),
    lambda rng: "[" + "".join(chr(rng.randrange(0x100, 0xD000)) for _ in range(draws.size(rng, 3000))) + "]+",
)  # fmt: skip
