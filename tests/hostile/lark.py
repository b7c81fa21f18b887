"""Hostile grammars in Lark, and a few in GBNF."""

# ruff: noqa: UP031  braces are part of what is written here

from __future__ import annotations

import json
import random
from collections.abc import Callable

from tests.hostile import draws, regexes, schemas


def chain(length: int) -> str:
    """Rules of which each one is the next one."""
    rules = "\n".join(f"r{index}: r{index + 1}" for index in range(length))
    return f'start: r0\n{rules}\nr{length}: "a"'


def doubling(levels: int, name: str = "T") -> str:
    """Terminals (or rules, with a lower-case name) of which each one is the next one twice."""
    lines = [f"{name}{index}: {name}{index + 1} {name}{index + 1}" for index in range(levels)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{levels}: "a" | "b"'])


def many_choices(count: int) -> str:
    """Masks that take long: at each place, many rules may go on."""
    lines = [
        f'r{index}: /[a-z ]*{index}/ r{index % 7} | "x{index}" r{(index * 31 + 7) % count}' for index in range(count)
    ]
    return "\n".join(["start: " + " | ".join(f"r{index}" for index in range(count)), *lines])


def ambiguous(operators: int) -> str:
    """Expressions that can be read in many ways."""
    return 'start: e\ne: e e | e "+" e | "(" e ")" | "a"' + "".join(f' | e "{index}" e' for index in range(operators))


NAMED: dict[str, Callable[[], str]] = {
    "2,700 rules in a chain": lambda: chain(2700),
    "doubling terminals": lambda: doubling(20),
    "start: start": lambda: "start: start",
    "2.3 KB with long masks": lambda: many_choices(36),
    "cycle": lambda: "start: a\na: b\nb: a",
}
"""The literal examples of the attack that this corpus grew from."""

_RULES = 6


def _rule(rng: random.Random) -> str:
    return f"r{rng.randrange(_RULES)}"


def _atom(rng: random.Random, depth: int) -> str:
    match rng.randrange(9):
        case 0 | 1:
            return json.dumps(rng.choice(("a", "b", "ab", "abc", draws.text(rng, 5))), ensure_ascii=False)
        case 2:
            return "/" + regexes.regex(rng, 2).replace("/", r"\/") + "/" + rng.choice(("", "", "i", "s", "x"))
        case 3 | 4:
            return _rule(rng)
        case 5:
            return f"T{rng.randrange(_RULES)}"
        case 6 if depth:
            return f"({_alternatives(rng, depth - 1)})"
        case 7:
            return rng.choice(('"a".."z"', "<|end|>", "<[0-9]>", "<[^5]>", "@other", "%json {}", '"a"i', "~T0"))
        case _:
            return f"%json {json.dumps(schemas.schema(rng))}" if rng.random() < 0.3 else '"c"'


def _item(rng: random.Random, depth: int) -> str:
    count = draws.size(rng, 5000)
    suffix = rng.choice(
        ("",) * 6 + ("*", "+", "?", "~3", f"~1..{count}", "{%d}" % count, "{1,%d}" % count, "{%d,}" % count)
    )
    return _atom(rng, depth) + suffix


def _alternatives(rng: random.Random, depth: int) -> str:
    rows = (" ".join(_item(rng, depth) for _ in range(rng.randrange(4))) for _ in range(draws.size(rng, 6)))
    return " | ".join(rows)


def _drawn(rng: random.Random) -> str:
    lines = [f"start: {_alternatives(rng, 2)}"]
    lines += [f"r{index}: {_alternatives(rng, 2)}" for index in range(_RULES)]
    lines += [f"T{index}: {_alternatives(rng, 1)}" for index in range(_RULES)]
    if rng.random() < 0.2:
        extra = (
            "%ignore /[ ]+/",
            "%import common.INT",
            "%llguidance {}",
            "r0[capture]: r1",
            "start: r0",
            "// text",
            "T0.99: /a/",
        )
        lines.append(rng.choice((*extra, 'r1[temperature=1e308, max_tokens=0, stop="a"]: /.*/', "%unknown")))
    grammar = "\n".join(lines)
    if rng.random() < 0.1:
        place = rng.randrange(len(grammar))
        grammar = grammar[:place] + draws.text(rng) + grammar[place + rng.randrange(3) :]
    return grammar


def _gbnf(rng: random.Random) -> str:
    lines = [f"root ::= {_alternatives(rng, 1)}", *(f"r{index} ::= {_alternatives(rng, 1)}" for index in range(_RULES))]
    return "\n".join(lines)


_SHAPES: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: chain(draws.size(rng, 4000)),
    lambda rng: doubling(draws.size(rng, 40), rng.choice(("T", "r"))),
    lambda rng: many_choices(draws.size(rng, 200)),
    lambda rng: "start: " + "(" * (depth := draws.size(rng, 5000)) + '"a"' + ")" * depth,
    lambda rng: "start: " + "(" * (depth := draws.size(rng, 8)) + '"a"' + "){1,%d}" % draws.size(rng, 3000) * depth,
    lambda rng: 'start: "a" start "b" | start start | ""',
    lambda rng: ambiguous(draws.size(rng, 50)),
    lambda rng: "start: " + " ".join(f'"{index}"?' for index in range(draws.size(rng, 3000))),
    lambda rng: "start: " + " | ".join(f'"{"a" * index}"' for index in range(1, draws.size(rng, 400) + 1)),
    lambda rng: "start: T0\n" + "\n".join(f"T{index}: /{regexes.regex(rng)}/" for index in range(draws.size(rng, 300))),
    lambda rng: "start: " + " & ".join(f"/.*{chr(97 + index)}.*/" for index in range(draws.size(rng, 26))),
    lambda rng: "start: r0\n" + "\n".join(f"r{i}: r{rng.randrange(200)} r{rng.randrange(200)} |" for i in range(200)),
    lambda rng: '%%ignore / */\nstart: "a"{%d}' % draws.size(rng, 10**7),
    lambda rng: f"start: %json {json.dumps(schemas.schema(rng))}",
)  # fmt: skip


def grammar(rng: random.Random) -> str:
    """A grammar: half of them are drawn from the grammar of Lark, and half have a shape that is known to hurt."""
    if rng.random() < 0.5:
        return rng.choice(_SHAPES)(rng)
    return _gbnf(rng) if rng.random() < 0.1 else _drawn(rng)
