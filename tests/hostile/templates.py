"""Hostile chat templates, in Jinja."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from tests.hostile import draws


def nested_loops(depth: int, count: int) -> str:
    """Loops in each other that write nothing."""
    opened = "".join(f"{{% for x{index} in range({count}) %}}" for index in range(depth))
    return opened + "{% endfor %}" * depth


def doubling(times: int, write: bool = False) -> str:
    """A text that is doubled so many times."""
    body = "{% set t.x = t.x ~ t.x %}" * times
    return "{% set t = namespace(x='abcdefgh') %}" + body + ("{{ t.x }}" if write else "")


NAMED: dict[str, Callable[[], str]] = {
    "nested empty loops": lambda: nested_loops(6, 99_999),
    "doubling texts": lambda: doubling(40),
    "doubling texts by +": lambda: doubling(40).replace("~", "+"),
    "a wide format": lambda: "{{ '%3000000000d' % 1 }}",
    "a wide format of a message": lambda: "{{ ('%' ~ messages|length ~ '000000000d') % 1 }}",
    "ljust": lambda: "{{ 'a'.ljust(3000000000) }}",
    "format": lambda: "{{ '{:3000000000}'.format(1) }}",
    "center": lambda: "{{ 'a'|center(3000000000) }}",
    "indent": lambda: "{{ ('a\\n' * 999999)|indent(100000) }}",
    "join": lambda: "{{ range(99999)|join('a' * 99999) }}",
    "wordwrap": lambda: "{{ ('a' * 999999)|wordwrap(1, true, 'b' * 9999) }}",
    "lipsum": lambda: "{{ lipsum(n=99999999) }}",
    "replace": lambda: "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
}
"""The literal examples of the attack that this corpus grew from."""

_NAMES = (
    "messages",
    "m",
    "x",
    "t",
    "loop",
    "tools",
    "bos_token",
    "add_generation_prompt",
    "missing",
    "namespace",
    "self",
)
_FILTERS = (
    "abs", "attr('__class__')", "batch(3)", "batch(10**9, 'x')", "capitalize", "center(10**8)", "count",
    "default('x')", "dictsort", "e",
    "escape", "filesizeformat", "first", "float", "forceescape", "format(1)", "groupby('role')",
    "indent(99999, true)", "int(base=36)",
    "items", "join('ab')", "last", "length", "list", "lower", "map('upper')", "map(attribute='content')", "max",
    "min", "pprint", "random",
    "reject('none')", "replace('a', 'aa')", "reverse", "round(400)", "safe", "select('string')", "slice(10**7)",
    "sort", "string", "striptags",
    "sum(start=[])", "title", "tojson", "tojson(indent=9999)", "trim", "truncate(10**9)", "unique", "upper",
    "urlencode", "urlize",
    "wordcount", "wordwrap(1)", "xmlattr", "nothing",
)  # fmt: skip
_METHODS = (
    ".split('')", ".split('a')", ".zfill(10**9)", ".rjust(10**9)", ".expandtabs(10**8)", ".join(messages)",
    ".replace('', 'b' * 9999)", ".encode()",
    ".format_map({})", ".format(messages)", ".translate({97: 'b' * 9999})", ".items()", ".append(1)",
    ".__class__.__mro__", ".strip()",
    "[::-1]", "[:10**9]", "[0]", "[-1]", ".content", "['role']", ".__init__.__globals__", ".title()", ".casefold()",
    "(1)", "()",
)  # fmt: skip


def _expression(rng: random.Random, depth: int) -> str:
    if depth <= 0:
        return rng.choice(
            (
                lambda: rng.choice(_NAMES),
                lambda: str(rng.choice((0, 1, -1, 3, 99, 2**31, 10**9, 10**30, 1e308, 0.5))),
                lambda: json.dumps(draws.text(rng, 20), ensure_ascii=False),
                lambda: rng.choice(
                    (
                        "'a'",
                        "'ab' * 999",
                        "[]",
                        "{}",
                        "()",
                        "none",
                        "true",
                        "range(99999)",
                        "range(10**9)",
                        "dict(a=1)",
                        "cycler(1)",
                    )
                ),
            )
        )()
    deeper = depth - 1
    match rng.randrange(9):
        case 0 | 1:
            operator = rng.choice(("+", "-", "*", "/", "//", "%", "**", "~", "in", "==", "<", "and", "or", "is not"))
            return f"({_expression(rng, deeper)} {operator} {_expression(rng, deeper)})"
        case 2 | 3:
            return f"({_expression(rng, deeper)})|{rng.choice(_FILTERS)}"
        case 4:
            return f"({_expression(rng, deeper)}){rng.choice(_METHODS)}"
        case 5:
            return f"({_expression(rng, deeper)} if {_expression(rng, deeper)} else {_expression(rng, deeper)})"
        case 6:
            return f"[{_expression(rng, deeper)}] * {draws.size(rng, 10**9)}"
        case 7:
            test = rng.choice(
                ("defined", "none", "string", "mapping", "sequence", "divisibleby(0)", "sameas(x)", "nothing")
            )
            return f"({_expression(rng, deeper)}) is {test}"
        case _:
            width = draws.size(rng, 10**10)
            return rng.choice(
                (
                    f"'%{width}s' % x",
                    f"'%.{width}f' % 1",
                    f"'{{:>{width}}}'.format(x)",
                    f"'a' * {width}",
                    f"2 ** {width}",
                )
            )


def _statement(rng: random.Random, depth: int) -> str:
    value = _expression(rng, rng.randrange(3))
    inner = _statements(rng, depth - 1) if depth > 0 else "a"
    match rng.randrange(11):
        case 0 | 1 | 2:
            return f"{{{{ {value} }}}}"
        case 3:
            items = rng.choice(("messages", f"range({draws.size(rng, 10**9)})", value))
            extra = rng.choice(("", "", " recursive", " if x"))
            again = "{{ loop(messages) }}" if extra == " recursive" else ""
            return f"{{% for x in {items}{extra} %}}{inner}{again}{{% else %}}b{{% endfor %}}"
        case 4:
            return f"{{% if {value} %}}{inner}{{% elif x %}}a{{% else %}}b{{% endif %}}"
        case 5:
            return f"{{% set x = {value} %}}"
        case 6:
            return (
                "{% set t = namespace(x='ab') %}{% for i in range("
                + str(draws.size(rng, 60))
                + ") %}{% set t.x = t.x ~ t.x %}{% endfor %}"
            )
        case 7:
            return "{% macro f(n) %}" + inner + "{{ f(n + 1) }}{% endmacro %}{{ f(" + value + ") }}"
        case 8:
            return f"{{% set x %}}{inner}{{% endset %}}{{{{ x * {draws.size(rng, 10**6)} }}}}"
        case 9:
            odd = (
                "{% break %}",
                "{% include 'x' %}",
                "{% import 'os' as os %}",
                "{% extends 'x' %}",
                "{% raw %}{{{% endraw %}",
                "{# x #}",
            )
            return rng.choice(
                (
                    *odd,
                    "{% generation %}a{% endgeneration %}",
                    "{{ raise_exception('no\\nno') }}",
                    "{{ strftime_now('%Y' * 999) }}",
                )
            )
        case _:
            name = rng.choice(_FILTERS)
            return f"{{% filter {name} %}}{inner}{{% endfilter %}}"


def _statements(rng: random.Random, depth: int) -> str:
    return "\n".join(_statement(rng, depth) for _ in range(draws.size(rng, 4)))


_APPEND = "{% if x.append(1) %}{% endif %}"
_SHAPES: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: nested_loops(draws.size(rng, 12), draws.size(rng, 99_999)),
    lambda rng: doubling(draws.size(rng, 60), rng.random() < 0.5),
    lambda rng: "{{ " + "(" * (depth := draws.size(rng, 3000)) + "1" + ")" * depth + " }}",
    lambda rng: "{{ " + "-" * draws.size(rng, 5000) + "1 }}",
    lambda rng: "{{ " + " + ".join(["1"] * draws.size(rng, 20_000)) + " }}",
    lambda rng: "{% if x %}" * (depth := draws.size(rng, 300)) + "{% endif %}" * depth,
    lambda rng: "{{ x" + ".a" * draws.size(rng, 5000) + " }}",
    lambda rng: "{{ x" + "|upper" * draws.size(rng, 5000) + " }}",
    lambda rng: "{{ a }}" * draws.size(rng, 30_000),
    lambda rng: "{{ " + "[" * (depth := draws.size(rng, 300)) + "]" * depth + " }}",
    lambda rng: "{{ " + "9" * draws.size(rng, 9000) + " }}",
    lambda rng: "{{ 9" + " ** 9" * draws.size(rng, 12) + " }}",
    lambda rng: "{{ " + f"(('a' * {draws.size(rng, 10**7)})|{rng.choice(_FILTERS)})|{rng.choice(_FILTERS)}" + " }}",
    lambda rng: "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    lambda rng: "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    lambda rng: "{% set x = [] %}" + nested_loops(2, 99_999).replace("{% endfor %}", _APPEND + "{% endfor %}", 1),
)  # fmt: skip


def template(rng: random.Random) -> str:
    """A template: half of them are drawn from the grammar of Jinja, and half have a shape that is known to hurt."""
    if rng.random() < 0.5:
        return rng.choice(_SHAPES)(rng)
    source = _statements(rng, 3)
    if rng.random() < 0.1:
        place = rng.randrange(len(source) + 1)
        source = source[:place] + rng.choice(("{%", "}}", "{{", "{#", "%}", draws.text(rng))) + source[place:]
    return source
