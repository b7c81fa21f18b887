"""A rank's process launches plans as they come, and answers as the device finishes them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shardline.channel import Channel
from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.messages.control import Control, ControlDone, Probe
from shardline.messages.step import RankStep, StepPlan, StepResult
from shardline.messages.worker import (
    RankFailed,
    RankReady,
    RankReport,
    RunStep,
    StartWorker,
    StepDone,
    WorkerReply,
    WorkerRequest,
)
from shardline.runtime import worker_process
from shardline.runtime.runner import PendingStep

NOTHING = msgspec.msgpack.encode(None)


class SlowDevice:
    """Finishes steps when it is told to."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.finished: list[int] = []
        self._may_finish = [threading.Event() for _ in range(3)]
        self._changed = threading.Condition()

    def launch_step(self, step: RankStep) -> PendingStep:
        number = step.plan.step_id
        device = self

        class Download:
            is_immediate = False

            def wait(self) -> list[Any]:
                device._may_finish[number].wait(10)
                if number == 2:
                    raise RuntimeError("the device is lost")
                return []

        def finish(tensors: list[Any]) -> StepResult:
            self.finished.append(number)
            return StepResult(number, [])

        with self._changed:
            self.launched.append(number)
            self._changed.notify_all()
        return PendingStep(Download(), finish)  # type: ignore[arg-type]

    def finish(self, number: int) -> None:
        self._may_finish[number].set()

    def await_launches(self, numbers: list[int]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.launched == numbers, timeout=10), self.launched


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `serve_rank` over a device; its reader would end the process with the engine, and here ends its thread."""
    monkeypatch.setattr(os, "_exit", lambda status: None)
    sockets: list[socket.socket] = []
    before = set(threading.enumerate())

    def start(device: SlowDevice) -> Channel[WorkerReply]:
        ours, theirs = socket.socketpair()
        sockets.extend((ours, theirs))
        report = RankReport(0, "host", 1, "GPU", "none", 1, 0, 0, 0.0)
        load: Callable[..., Any] = lambda start, segment, agree, store: (SimpleNamespace(runner=device), report, True)  # noqa: E731
        monkeypatch.setattr(worker_process, "_load", load)
        channel = Channel[WorkerRequest](theirs, WorkerRequest)  # type: ignore[arg-type]
        threading.Thread(target=worker_process.serve_rank, args=(channel, memoryview(b"")), daemon=True).start()
        engine = Channel[WorkerReply](ours, WorkerReply)  # type: ignore[arg-type]
        engine.send(StartWorker(resolve_here(EngineConfig()), 0, 0))
        assert isinstance(engine.receive(), RankReady)
        return engine

    yield start
    for sock in sockets:
        sock.shutdown(socket.SHUT_RDWR)
    for thread in set(threading.enumerate()) - before:
        if "_read_messages" in thread.name:
            thread.join(10)
    for sock in sockets:
        sock.close()


def plan(number: int) -> RunStep:
    return RunStep(RankStep(StepPlan(number, [], [], []), (0,), (0,)))


def test_a_plan_is_launched_while_the_one_before_runs(serve: Callable[[SlowDevice], Channel[WorkerReply]]) -> None:
    device = SlowDevice()
    engine = serve(device)
    engine.send(plan(0))
    device.await_launches([0])
    engine.send(plan(1))
    device.await_launches([0, 1])
    assert device.finished == []
    device.finish(1)  # nothing is told before its turn
    device.finish(0)
    for number in (0, 1):
        answer = engine.receive()
        assert isinstance(answer, StepDone)
        assert answer.result.step_id == number
    assert device.finished == [0, 1]
    engine.send(plan(2))
    device.await_launches([0, 1, 2])
    device.finish(2)
    failure = engine.receive()
    assert isinstance(failure, RankFailed)
    assert failure.message == "RuntimeError: the device is lost"


def test_a_probe_is_answered_between_steps(serve: Callable[[SlowDevice], Channel[WorkerReply]]) -> None:
    """A thread that hangs in a step must not answer; steps that run on the device do not delay the answer."""
    may_launch = threading.Event()

    class HangingDevice(SlowDevice):
        def launch_step(self, step: RankStep) -> PendingStep:
            may_launch.wait(10)
            return super().launch_step(step)

    device = HangingDevice()
    engine = serve(device)
    engine.send(Control.carry(1, Probe()))
    assert engine.receive(timeout=10) == ControlDone(1, (NOTHING,))
    engine.send(plan(0))
    engine.send(Control.carry(2, Probe()))
    with pytest.raises(TimeoutError):
        engine.receive(timeout=0.2)
    may_launch.set()
    assert engine.receive(timeout=10) == ControlDone(2, (NOTHING,))
    device.finish(0)
    assert isinstance(engine.receive(timeout=10), StepDone)
