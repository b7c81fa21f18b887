"""Engines that cannot start again: pauses between tries, and shortages, which are no failures of the replica."""

from __future__ import annotations

import errno
import os
import queue
import re
from collections.abc import Callable

import pytest

from shardline.api import engines
from shardline.api.engines import Client, EngineEvent, EngineRestarted, RestartFailed
from shardline.config.engine import EngineConfig
from tests.api.fake_engine import FakeEngineClient
from tests.api.test_failover import MAX_RESTARTS, Cluster

Connect = Callable[[EngineConfig, int, Callable[[EngineEvent], None]], Client]


def failing(errors: queue.SimpleQueue[OSError]) -> Connect:
    """Starts engines, the first one and then those for which no error is left."""
    starts: list[Client] = []

    def connect(config: EngineConfig, index: int, on_message: Callable[[EngineEvent], None]) -> Client:
        if starts and not errors.empty():
            raise errors.get()
        starts.append(FakeEngineClient(config, index, on_message))
        return starts[-1]

    return connect


def test_a_shortage_is_waited_for_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engines, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(engines, "_LONGEST_PAUSE", 0.05)
    errors: queue.SimpleQueue[OSError] = queue.SimpleQueue()
    for _ in range(MAX_RESTARTS + 2):
        errors.put(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    cluster = Cluster(failing(errors))
    cluster.fail(0)
    cluster.pass_restart(EngineRestarted)
    assert cluster.replicas.alive() == [True]
    assert re.search(
        r"could not start again: \[Errno 24\] Too many open files: the limit is \d+ open files", caplog.text
    )
    pauses = [float(pause) for pause in re.findall(r"is tried again in (\S+) s", caplog.text)]
    assert pauses == [0.01, 0.02, 0.04, 0.05, 0.05, 0.05, 0.05]
    cluster.fail(0)
    cluster.pass_restart(EngineRestarted)
    assert len(re.findall("is tried again", caplog.text)) == len(pauses), "a start that works ends the pauses"
    cluster.replicas.close()


def test_other_failures_pause_too_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    errors: queue.SimpleQueue[OSError] = queue.SimpleQueue()
    for _ in range(MAX_RESTARTS):
        errors.put(OSError(errno.ECONNRESET, "the model's disk is away"))
    cluster = Cluster(failing(errors))
    ending = cluster.replicas._engines._ending

    def wait(seconds: float) -> bool:
        pauses.append(seconds)
        return False

    monkeypatch.setattr(ending, "wait", wait)
    cluster.fail(0)
    for _ in range(MAX_RESTARTS):
        cluster.pass_restart(RestartFailed)
    assert pauses == [0, 1, 2, 4, 8]
    assert "killed" in cluster.replicas.dead_reason
    cluster.replicas.close()


def test_closing_ends_a_pause() -> None:
    errors: queue.SimpleQueue[OSError] = queue.SimpleQueue()
    for _ in range(100):
        errors.put(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    cluster = Cluster(failing(errors))
    cluster.fail(0)
    while errors.qsize() == 100:
        pass
    cluster.replicas.close()
    assert cluster.events.empty(), "nobody wants to know"
