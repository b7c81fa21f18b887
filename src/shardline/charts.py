"""Reports as one HTML file that needs no network: a page, and charts as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
GREY = "#9ca3af"
_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 10, 45
_STEPS = (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10)
"""Ends of axes, in powers of ten, whose quarters are short numbers."""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;color:#1f2937;background:#fff}}
h1{{font-size:1.4rem}}h2{{font-size:1.1rem;margin-top:2rem}}
pre{{background:#f3f4f6;padding:1rem;overflow:auto;font-size:12px;border-radius:6px}}
table{{border-collapse:collapse}}td,th{{padding:.15rem .8rem;border-bottom:1px solid #eee;text-align:right}}
td:first-child,th:first-child{{text-align:left}}.warning{{background:#fff3cd;padding:.5rem 1rem}}
svg{{max-width:100%;height:auto;background:#fff}}svg text{{font-size:12px;fill:#374151}}
.charts{{display:grid;grid-template-columns:repeat(auto-fit,minmax(30rem,1fr));gap:1rem}}
</style></head><body><h1>{title}</h1>
{head}
<div class="charts">{charts}</div>
</body></html>
"""


def page(title: str, head: str, charts: Iterable[tuple[str, str]]) -> str:
    """An HTML page: its title, HTML below it, and (title, SVG) of the charts; those without an SVG are left out."""
    figures = [
        f"<figure><figcaption><h2>{escape(name)}</h2></figcaption>{drawing}</figure>"
        for name, drawing in charts
        if drawing
    ]
    return _PAGE.format(title=escape(title), head=head, charts="".join(figures))


def color(index: int) -> str:
    """The color of a series."""
    return COLORS[index % len(COLORS)]


class Chart:
    """Points, lines and bars over two axes that start at zero."""

    def __init__(self, x_name: str, y_name: str, x_max: float, y_max: float, *, doubles: bool = False) -> None:
        """Axes up to the next round numbers. With `doubles`, x is the power of two of the number to show."""
        self._x_max = 4.0 * math.ceil(max(1.0, x_max) / 4) if doubles else _round_up(x_max)
        self._y_max = _round_up(y_max)
        right, base = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        self._parts = [
            f'<path d="M{_LEFT} {_TOP}V{base}H{right}" fill="none" stroke="#374151"/>',
            f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>',
            f'<text x="14" y="{base / 2}" text-anchor="middle" transform="rotate(-90 14 {base / 2})">'
            f"{escape(y_name)}</text>",
        ]
        for quarter in range(5):
            x_value, y_value = self._x_max * quarter / 4, self._y_max * quarter / 4
            x, y = self.x(x_value), self.y(y_value)
            shown = f"{2**x_value:.0f}" if doubles else f"{x_value:.4g}"
            self._parts += [
                f'<text x="{x:.1f}" y="{base + 18}" text-anchor="middle">{shown}</text>',
                f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_value:.4g}</text>',
                f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#e5e7eb"/>',
            ]

    def x(self, value: float) -> float:
        """The place of a value on the horizontal axis."""
        return _LEFT + (_WIDTH - _RIGHT - _LEFT) * value / self._x_max

    def y(self, value: float) -> float:
        """The place of a value on the vertical axis."""
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / self._y_max

    def dot(self, x: float, y: float, fill: str, note: str) -> None:
        """Add a point; `note` is shown to those who point at it."""
        self._parts.append(
            f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="5" fill="{fill}" fill-opacity="0.8">'
            f"<title>{escape(note)}</title></circle>"
        )

    def line(self, points: Iterable[tuple[float, float]], index: int, name: str = "") -> None:
        """Add the series `index`, with its name at the right."""
        path = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        if path:
            self._parts.append(f'<path d="M{path}" fill="none" stroke="{color(index)}" stroke-width="2"/>')
        self._parts.append(
            f'<text x="{_WIDTH - 24}" y="{22 + 15 * index}" text-anchor="end" style="fill:{color(index)}">'
            f"{escape(name)}</text>"
        )

    def bar(self, start: float, length: float, top: float, fill: str) -> None:
        """Add a horizontal bar that hangs from the value `top` and is nearly as high as 1."""
        width = max(0.3, self.x(length) - self.x(0))
        height = max(0.6, 0.8 * (self.y(0) - self.y(1)))
        self._parts.append(
            f'<rect x="{self.x(start):.1f}" y="{self.y(top):.1f}" width="{width:.1f}" height="{height:.2f}" '
            f'fill="{fill}"/>'
        )

    def svg(self) -> str:
        """The chart."""
        return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(self._parts)}</svg>'


def stacked_bars(rows: Iterable[tuple[str, Iterable[tuple[str, float]]]], unit: str) -> str:
    """An SVG with a bar for each (name, parts); a part is (name, size)."""
    bars = [(name, list(parts)) for name, parts in rows]
    largest = max(sum(size for _, size in parts) for _, parts in bars)
    step, left, room_for_number = 22, 170, 32
    drawn = []
    for number, (name, parts) in enumerate(bars):
        x, y = float(left), 10 + step * number
        drawn.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        for index, (part, size) in enumerate(parts):
            width = (_WIDTH - left - _RIGHT) * size / largest
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{step - 6}" fill="{color(index)}">'
                f"<title>{part}: {size:.1f} {unit}</title></rect>"
            )
            if width > room_for_number:
                drawn.append(f'<text x="{x + 4:.1f}" y="{y + 13}" style="fill:#fff">{size:.1f}</text>')
            x += width
    return f'<svg viewBox="0 0 {_WIDTH} {20 + step * len(bars)}">{"".join(drawn)}</svg>'


def _round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in _STEPS if step * power >= value * 0.999999)
