"""Reports in HTML: axes, and what is shown of data."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from shardline.charts import Chart, page, stacked_bars


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("text")]


def test_axes_start_at_zero_and_end_at_a_round_number() -> None:
    marks = texts(Chart("seconds", "tokens <n>", 7.3, 1130).svg())
    assert marks[:2] == ["seconds", "tokens <n>"]
    assert marks[2::2] == ["0", "2", "4", "6", "8"]
    assert marks[3::2] == ["0", "300", "600", "900", "1200"]
    doubling = texts(Chart("requests", "y", 5.0, 1.0, doubles=True).svg())
    assert doubling[2::2] == ["1", "4", "16", "64", "256"]
    assert "1" in texts(Chart("x", "y", 0.0, 0.0).svg()), "nothing was measured"


def test_marks_lie_where_their_values_are() -> None:
    chart = Chart("x", "y", 10, 10)
    chart.dot(10, 10, "red", "a & b")
    chart.line([(0, 0), (5, 10)], 1, "second")
    chart.bar(5, 5, 10, "blue")
    svg = chart.svg()
    assert f'cx="{chart.x(10):.1f}" cy="{chart.y(10):.1f}"' in svg
    assert "a &amp; b" in svg
    assert f"M{chart.x(0):.1f} {chart.y(0):.1f}L{chart.x(5):.1f} {chart.y(10):.1f}" in svg
    assert texts(svg)[-1] == "second"
    [width] = re.findall(r'<rect [^>]*width="([\d.]+)"', svg)
    assert float(width) == pytest.approx(chart.x(10) - chart.x(5), abs=0.1)


def test_parts_of_a_bar_follow_each_other() -> None:
    svg = stacked_bars([("first", [("weights", 30.0), ("cache", 10.0)]), ("second", [("weights", 20.0)])], "GiB")
    bars = [
        tuple(float(rect.get(name) or 0) for name in ("x", "y", "width"))
        for rect in ElementTree.fromstring(svg).iter("rect")
    ]
    assert bars[1][0] == pytest.approx(bars[0][0] + bars[0][2], abs=0.2)
    assert bars[2][2] == pytest.approx(2 * bars[1][2], abs=0.2)
    assert bars[2][1] > bars[0][1]
    assert "cache: 10.0 GiB" in svg


def test_a_page_has_the_charts_that_there_are() -> None:
    text = page("A <plan>", "<pre>text</pre>", [("empty", ""), ("drawn", Chart("x", "y", 1, 1).svg())])
    assert "<title>A &lt;plan&gt;</title>" in text
    assert text.count("<figure>") == 1
    assert "empty" not in text
    assert not re.search(r"(?:src|href)=|https?://", text)
