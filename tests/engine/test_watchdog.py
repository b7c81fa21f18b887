"""The watchdog on a clock of its own: whom it probes, whom it gives up, and whom it must spare."""

from __future__ import annotations

import pytest

from shardline.engine.watchdog import Verdict, Watchdog, probe_interval

WAIT, PROBE, LOST = Verdict.WAIT, Verdict.PROBE, Verdict.LOST


class Peer:
    """What a peer has said so far."""

    def __init__(self) -> None:
        self.num_messages = 0

    def __call__(self) -> int:
        return self.num_messages


class Clock:
    """Seconds, set by the test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def watchdog(clock: Clock, peer: Peer) -> Watchdog:
    return Watchdog(interval=2.0, patience=8.0, signs_of_life=peer, clock=clock)


def pass_time(clock: Clock, watchdog: Watchdog, seconds: float) -> list[Verdict]:
    """The verdicts of a caller that checks in time, WAIT left out."""
    end, verdicts = clock.now + seconds, []
    while clock.now < end:
        clock.now = min(end, clock.now + max(0.01, watchdog.seconds_to_check()))
        verdicts.append(watchdog.check())
    return [verdict for verdict in verdicts if verdict is not WAIT]


def test_a_silent_peer_is_probed_once_and_given_up_when_its_patience_ends(clock: Clock, watchdog: Watchdog) -> None:
    assert pass_time(clock, watchdog, 1.9) == []
    assert pass_time(clock, watchdog, 0.2) == [PROBE]
    assert pass_time(clock, watchdog, 7.8) == []
    assert pass_time(clock, watchdog, 0.2)[0] is LOST


def test_a_peer_that_answers_is_probed_again_and_again(clock: Clock, watchdog: Watchdog, peer: Peer) -> None:
    for _ in range(20):
        assert pass_time(clock, watchdog, 2.01) == [PROBE]
        clock.now += 0.1
        peer.num_messages += 1
        assert watchdog.check() is WAIT


def test_a_peer_that_talks_is_not_probed(clock: Clock, watchdog: Watchdog, peer: Peer) -> None:
    for _ in range(20):
        assert pass_time(clock, watchdog, 1.9) == []
        peer.num_messages += 1


def test_a_step_that_begins_before_the_probe_and_another_after_it_are_both_allowed(
    clock: Clock, watchdog: Watchdog, peer: Peer
) -> None:
    """The peer says nothing for 1.9 + 7.9 s, but the probe waits for the second step only."""
    assert pass_time(clock, watchdog, 1.9) == []
    assert pass_time(clock, watchdog, 7.9) == [PROBE]
    peer.num_messages += 1
    assert pass_time(clock, watchdog, 1.9) == []


def test_what_was_said_before_the_probe_is_no_answer(clock: Clock, watchdog: Watchdog, peer: Peer) -> None:
    peer.num_messages += 1
    assert watchdog.check() is WAIT
    assert pass_time(clock, watchdog, 10.2)[:2] == [PROBE, LOST]


def test_a_process_that_was_stopped_itself_blames_nobody(clock: Clock, watchdog: Watchdog) -> None:
    assert pass_time(clock, watchdog, 2.01) == [PROBE]
    clock.now += 3600.0
    assert watchdog.check() is WAIT
    assert pass_time(clock, watchdog, 2.01) == [PROBE]
    assert pass_time(clock, watchdog, 7.9) == []
    assert pass_time(clock, watchdog, 0.2)[0] is LOST


def test_a_restart_forgets_the_probe(clock: Clock, watchdog: Watchdog) -> None:
    assert pass_time(clock, watchdog, 2.01) == [PROBE]
    watchdog.restart()
    assert pass_time(clock, watchdog, 9.9) == [PROBE]


def test_the_interval_is_a_quarter_of_the_deadline_and_five_seconds_at_most() -> None:
    assert (probe_interval(2.0), probe_interval(300.0)) == (0.5, 5.0)
