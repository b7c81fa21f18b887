"""Stop strings in a stream, compared with a search in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.text.stop_strings import StopMatcher


def brute_force(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=1000)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
)
def test_against_brute_force(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    shown = ""
    for piece in pieces:
        shown += matcher.add_text(piece)
        expected, _ = brute_force("".join(pieces), stops, include)
        assert expected.startswith(shown), "shown text is never taken back"
    shown += matcher.flush_text()
    assert (shown, matcher.match) == brute_force("".join(pieces), stops, include)


@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_holds_back_no_more_than_it_must(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.add_text(char) for char in text)
    if matcher.match is None:
        held = text[len(shown) :]
        assert held == max((s[:k] for s in stops for k in range(len(s)) if text.endswith(s[:k])), key=len)


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one two")])
def test_include_stop(include: bool, expected: str) -> None:
    matcher = StopMatcher(["two"], include)
    assert matcher.add_text("one t") + matcher.add_text("wo three") + matcher.add_text(" four") == expected
    assert matcher.match == "two"
    assert matcher.flush_text() == ""
