"""A comparison for people: lines for a terminal, and a page that needs no network."""

from __future__ import annotations

import math
from html import escape

from shardline.charts import Chart, color, page
from shardline.compare.answers import NUM_TOP
from shardline.compare.comparison import Comparison, Figure, Pair
from shardline.compare.differences import CAUSES, Difference, Side

_MOST_SHOWN = 20
"""Prompts that differ which a terminal shows."""
_MARK = "background:#fde68a"


def text_lines(found: Comparison) -> list[str]:
    """The report for a terminal."""
    lines = [f"A  {found.names[0]}", f"B  {found.names[1]}", "", _summary(found)]
    differing = [(number, pair) for number, pair in enumerate(found.pairs, 1) if not pair.equal]
    for number, pair in differing[:_MOST_SHOWN]:
        lines += ["", f"prompt {number}: {_shorten(pair.prompt)}", *(f"  {line}" for line in _pair_lines(pair))]
    if len(differing) > _MOST_SHOWN:
        lines += ["", f"and {len(differing) - _MOST_SHOWN} more that differ: --json has all"]
    speed = found.speed()
    if speed:
        lines += ["", f"{'medians with 95% intervals':28}  {'A':>26}  {'B':>26}  {'B / A':>26}"]
        lines += [
            f"{name:28}  {_figure(a):>26}  {_figure(b):>26}  {_figure(ratio):>26}"
            for name, (a, b, ratio) in speed.items()
        ]
    return lines


def html_page(found: Comparison) -> str:
    """The report as one HTML file."""
    head = f"<p>A: {escape(found.names[0])}<br>B: {escape(found.names[1])}</p><p><b>{escape(_summary(found))}</b></p>"
    speed = found.speed()
    if speed:
        rows = "".join(
            f"<tr><td>{name}</td>{''.join(f'<td>{_figure(figure)}</td>' for figure in figures)}</tr>"
            for name, figures in speed.items()
        )
        head += f"<table><tr><th>medians with 95% intervals</th><th>A</th><th>B</th><th>B / A</th></tr>{rows}</table>"
    for number, pair in enumerate(found.pairs, 1):
        if not pair.equal:
            head += f"<h2>Prompt {number}</h2><pre>{escape(pair.prompt)}</pre>{_pair_html(pair)}"
    return page("shardline compare", head, [("Log probabilities: how far they are apart", _deviations(found))])


def _summary(found: Comparison) -> str:
    total, equal = len(found.pairs), sum(pair.equal for pair in found.pairs)
    failed = sum(bool(pair.error) for pair in found.pairs)
    parts = [f"{equal} of {total} answers are equal, {found.num_same_bits} of them in every bit of their probabilities"]
    parts += [f"{count} differ by {CAUSES[cause]}" for cause, count in found.causes.items()]  # type: ignore[index]
    parts += [f"{failed} failed"] if failed else []
    return "; ".join(parts)


def _pair_lines(pair: Pair) -> list[str]:
    found = pair.difference
    if found is None:
        return [pair.error]
    return [
        f"differs at {_place(found)} after {found.before!r}",
        _side_line("A", found.a, found.b),
        _side_line("B", found.b, found.a),
        CAUSES[found.cause],
    ]


def _pair_html(pair: Pair) -> str:
    found = pair.difference
    if found is None:
        return f"<p>{escape(pair.error)}</p>"
    rows = "".join(
        f"<tr><td>{name}</td><td>{escape(found.before)}<span style='{_MARK}'>{escape(_token(side))}</span></td>"
        f"<td>{_probability(side, side.logprob)}</td><td>{_probability(side, side.other_logprob)}</td></tr>"
        for name, side in (("A", found.a), ("B", found.b))
    )
    head = "<tr><th></th><th>text</th><th>its own probability</th><th>that of the other's token</th></tr>"
    return f"<p>Differs at {_place(found)}: {escape(CAUSES[found.cause])}</p><table>{head}{rows}</table>"


def _deviations(found: Comparison) -> str:
    """A point for each prompt: where the answers differ, and how far log probabilities are apart up to there."""
    points = [
        (pair.difference.position if pair.difference else len(pair.a.tokens), pair.deviation, pair)
        for pair in found.pairs
        if pair.deviation is not None and math.isfinite(pair.deviation)
    ]
    if not points:
        return ""
    chart = Chart("equal tokens", "nats", max(x for x, *_ in points), max(y for _, y, _ in points))
    for x, y, pair in points:
        chart.dot(x, y, color(0 if pair.equal else 1), f"{_shorten(pair.prompt)}: {x} tokens, {y:.3g}")
    return chart.svg()


def _side_line(name: str, own: Side, other: Side) -> str:
    said = f"{name} says {_token(own)!r}"
    if own.logprob is None:
        return said
    theirs = "" if other.token is None else f", {_probability(own, own.other_logprob)} for {_token(other)!r}"
    return f"{said}: {_probability(own, own.logprob)}{theirs}"


def _place(found: Difference) -> str:
    return f"{'character' if found.cause == 'unknown' else 'token'} {found.position + 1}"


def _token(side: Side) -> str:
    return "(end)" if side.token is None else side.token


def _probability(side: Side, logprob: float | None) -> str:
    if side.logprob is None:
        return "not known"
    return f"not among the {NUM_TOP} likeliest" if logprob is None else f"{math.exp(logprob):.2%}"


def _figure(figure: Figure) -> str:
    return f"{figure.median:.4g} [{figure.low:.4g}, {figure.high:.4g}]"


def _shorten(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= 80 else f"{line[:79]}…"
