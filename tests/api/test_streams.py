"""The streams of requests: when all have finished."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardline.api.streams import watch_finish


class _Output:
    def __init__(self) -> None:
        self.ended = False
        self.looks = 0

    @property
    def finished(self) -> bool:
        self.looks += 1
        return self.ended


@given(st.permutations(range(7)))
def test_all_have_finished_when_the_last_one_has(order: list[int]) -> None:
    """A finished stream is looked at once, however often it is asked."""
    outputs = [_Output() for _ in order]
    streams: list[Any] = [SimpleNamespace(output=output) for output in outputs]
    finished = watch_finish(streams)
    for count, index in enumerate(order):
        assert not finished()
        outputs[index].ended = True
        looks = [output.looks for output in outputs]
        assert finished() == (count == len(order) - 1)
        assert sum(output.looks for output in outputs) - sum(looks) <= count + 2
    assert finished()
    assert sum(output.looks for output in outputs) <= 3 * len(order)
