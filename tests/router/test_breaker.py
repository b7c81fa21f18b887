"""When a backend is left alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardline.router.breaker import Breaker


def test_three_failures_in_a_row_open_it() -> None:
    breaker = Breaker()
    for outcome in "FFSFFF":
        assert breaker.allows(0.0)
        breaker.begin(0.0)
        breaker.succeed() if outcome == "S" else breaker.fail(0.0)
    assert breaker.state(0.9) == "open"
    assert not breaker.allows(0.9)


def test_one_trial_decides_and_each_failed_one_doubles_the_time() -> None:
    breaker = Breaker()
    for _ in range(3):
        breaker.begin(0.0)
        breaker.fail(0.0)
    now, waits = 0.0, []
    for _ in range(8):
        began = now
        while not breaker.allows(now):
            now += 0.25
        waits.append(now - began)
        breaker.begin(now)
        assert not breaker.allows(now), "one at a time"
        breaker.fail(now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    while not breaker.allows(now):
        now += 1.0
    breaker.begin(now)
    breaker.succeed()
    assert breaker.state(now) == "closed"


def opens_for(breaker: Breaker, now: float) -> float:
    """Seconds for which three failures open it."""
    for _ in range(3):
        breaker.begin(now)
        breaker.fail(now)
    seconds = 0.0
    while not breaker.allows(now + seconds):
        seconds += 0.25
    return seconds


def test_a_backend_that_flaps_is_left_alone_for_longer_each_time() -> None:
    breaker, now, waits = Breaker(), 0.0, []
    for _ in range(8):
        waits.append(opens_for(breaker, now))
        now += waits[-1]
        breaker.begin(now)
        breaker.succeed()
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert opens_for(breaker, now + 60.0) == 1.0, "it has answered for a minute"


def test_what_was_under_way_when_it_opened_makes_no_time_longer() -> None:
    breaker = Breaker()
    for _ in range(5):
        assert opens_for(breaker, 0.0) == 1.0
        breaker.succeed()


def test_a_client_that_leaves_during_the_trial_makes_room_for_the_next() -> None:
    breaker = Breaker()
    for _ in range(3):
        breaker.begin(0.0)
        breaker.fail(0.0)
    breaker.begin(1.0)
    breaker.give_up()
    assert breaker.allows(1.0)


@given(st.lists(st.tuples(st.sampled_from("SFG"), st.floats(0.0, 90.0)), max_size=60))
def test_it_always_comes_back(events) -> None:
    breaker, now = Breaker(), 0.0
    for outcome, seconds in events:
        now += seconds
        if breaker.allows(now):
            breaker.begin(now)
            {"S": breaker.succeed, "F": lambda: breaker.fail(now), "G": breaker.give_up}[outcome]()  # noqa: B023
    assert breaker.allows(now + 60.0)
