"""What is measured of replicas, and what it changes."""

from __future__ import annotations

import random

import pytest

from shardline.routing.pace import Costs, Pace, Paces
from shardline.routing.policies.base import ReplicaLoad
from shardline.routing.router import CHUNK_BYTES, Router


def measure(paces: Paces, replica: int, step: float, chunk: float, noise: float = 0.0, count: int = 60) -> None:
    draw = random.Random(replica)
    for _ in range(count):
        steps, chunks = draw.randrange(1, 100), draw.choice((0, 0, 5, 40))
        seconds = (steps * step + chunks * chunk) * (1.0 + draw.uniform(-noise, noise))
        paces.add(replica, steps, chunks, seconds)


def test_seconds_of_steps_and_chunks_are_found() -> None:
    draw, pace = random.Random(1), Pace()
    assert pace.seconds is None
    for step, chunk in ((0.01, 0.03), (0.02, 0.005)):  # later on, older ones count no more
        for _ in range(1500):
            steps, chunks = draw.randrange(100), draw.randrange(50)
            pace.add(steps, chunks, steps * step + chunks * chunk)
        assert pace.seconds == pytest.approx((step, chunk), rel=1e-3)


def test_what_cannot_be_told_apart_is_not_guessed() -> None:
    for steps, chunks, seconds in ((1, 0, 1.0), (0, 5, 1.0), (2, 3, 1.0), (0, 0, 0.0)):
        pace = Pace()
        for _ in range(100):
            pace.add(steps, chunks, seconds)
        assert pace.seconds is None
    faster_with_more = Pace()
    for chunks in range(100):
        faster_with_more.add(1, chunks, 100.0 - chunks)
    assert faster_with_more.seconds is None


def test_costs_are_those_of_a_usual_replica_unless_one_differs_clearly() -> None:
    paces = Paces()
    assert paces.costs(0) == Costs(1.0, 1.0)
    for replica in range(3):
        measure(paces, replica, 0.01, 0.005, noise=0.15)
    assert len({paces.costs(replica) for replica in range(4)}) == 1, "noise parts nobody; 3 is new"
    assert paces.costs(0).chunk == 1.0
    assert paces.costs(0).request == pytest.approx(2.0, rel=0.2)
    measure(paces, 3, 0.03, 0.02, noise=0.15)
    slow, usual = paces.costs(3), paces.costs(0)
    assert slow.request > 1.4 * usual.request
    assert slow.chunk > 1.4 * usual.chunk
    paces.forget(3)
    assert paces.costs(3) == paces.costs(4), "another replica has its number now"


def test_costs_are_bounded() -> None:
    paces = Paces()
    measure(paces, 0, 1e-9, 10.0)
    assert paces.costs(0).request == 0.25
    paces = Paces()
    measure(paces, 0, 10.0, 1e-9)
    assert paces.costs(0).request == 4.0
    for replica in (1, 2):
        measure(paces, replica, 1e-6, 1e-6)
    assert paces.costs(1) == pytest.approx(Costs(1.0, 1.0))
    assert 1.0 < paces.costs(0).request < 20.0
    assert 0.05 < paces.costs(0).chunk < 1.0


def test_a_replica_with_slow_steps_gets_less() -> None:
    router = Router("least_work")
    for replica, step in enumerate((0.05, 0.01, 0.01)):
        measure(router.paces, replica, step, 0.01)
    running = [0, 0, 0]
    for number in range(300):
        loads = [ReplicaLoad(count, 0, index, 256) for index, count in enumerate(running)]
        decision = router.decide(f"{number} ".encode().ljust(2 * CHUNK_BYTES, b"."), "", loads)
        running[decision.number] += 1
    assert 0.1 < running[0] / running[1] < 0.3, "as its steps take five times as long"
    assert abs(running[1] - running[2]) <= 1
