"""What the counters of ranks say about how they spend their time."""

from __future__ import annotations

import time

import pytest

from shardline.segment.progress import ProgressBoard


def board(num_ranks: int) -> ProgressBoard:
    return ProgressBoard(memoryview(bytearray(ProgressBoard.num_bytes(num_ranks))), range(num_ranks))


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 10.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def test_without_looks_all_time_in_steps_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, progress = Clock(monkeypatch), board(2)
    line = progress.line(1)
    for number in range(2):
        line.begin()
        clock.now += 0.5
        line.finish(number)
        clock.now += 3.0
    idle, worked = (one.times for one in progress.read())
    assert (idle.num_steps, idle.busy_seconds, idle.waiting_seconds) == (0, 0.0, 0.0)
    assert (worked.rank, worked.num_steps, worked.busy_seconds, worked.waiting_seconds) == (1, 2, 1.0, 0.0)


def test_steps_in_flight_at_once_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, progress = Clock(monkeypatch), board(1)
    line = progress.line(0)
    line.begin()
    clock.now += 1.0
    line.begin()
    clock.now += 1.0
    line.finish(0)
    clock.now += 1.0
    line.finish(1)
    assert progress.read()[0].times.busy_seconds == 3.0


def test_looks_attribute_the_time_to_what_they_find(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, progress = Clock(monkeypatch), board(1)
    line = progress.line(0)

    def look_forever(seconds: float) -> None:
        if clock.now > 10.0:
            raise InterruptedError
        line.begin()
        clock.now += 1.0
        assert line.sample()
        line.exchanges[1] = 1  # as an exchange in C++ writes it
        clock.now += 2.0
        assert line.sample()
        line.exchanges[1] = 0
        line.finish(0)
        clock.now += 5.0
        assert not line.sample()

    monkeypatch.setattr(time, "sleep", look_forever)
    with pytest.raises(InterruptedError):
        line.sample_waiting()
    times = progress.read()[0].times
    assert (times.num_steps, times.busy_seconds, times.waiting_seconds) == (1, 1.0, 2.0)
