"""Watches an engine for its front: gives it up if it shows no sign of life, and says how it ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shardline.deployment.deployment import Deployment
from shardline.engine.children import Child, is_own_end
from shardline.engine.watchdog import LOOK_SECONDS, STUCK_SECONDS, LoadWatch, Verdict, Watchdog, probe_interval
from shardline.messages.engine import EngineBeat, EngineFailed
from shardline.segment.activity import Activity
from shardline.segment.pulse_watch import CHECK_INTERVAL

_GRACE = 0.9
"""Seconds beyond the step's deadline that an engine has to answer: it can say which of its ranks is late."""
_LOADING_GRACE = 10.0
"""The same for an engine that loads."""


class EngineWatch:
    """What is known of one engine's life. Its owner counts messages, and calls `run` in a thread of its own."""

    def __init__(
        self,
        deployment: Deployment,
        replica: int,
        child: Child | None,
        probe: Callable[[], object],
        cut_off: Callable[[], None],
    ) -> None:
        """`child`: the engine's process; None: it runs on another host. `probe` asks the engine for an answer, and
        `cut_off` ends the connection to it."""
        self._deployment = deployment
        self._replica = replica
        self._child = child
        self._probe = probe
        self._cut_off = cut_off
        self.is_ready = threading.Event()
        """The engine has loaded."""
        self.is_over = threading.Event()
        """Nobody need watch the engine any more: it has ended, or it is to end."""
        self.num_messages = 0
        """Messages of the engine so far."""
        self._remote = Activity()
        self._killed_because = ""
        self._silence = 0.0
        """Seconds for which the engine had done nothing when it was killed."""
        interval = probe_interval(deployment.step_timeout)
        patience = deployment.step_timeout + _GRACE - interval
        # A step may be long.
        self._watchdog = Watchdog(interval, patience, lambda: (self.num_messages, self._work()))

    def note_beat(self, beat: EngineBeat) -> None:
        """The node of an engine on another host has told what the engine has done."""
        self._remote = beat.activity

    def run(self) -> None:
        """End the engine if it gives no sign of life or does not answer; returns once it is over."""
        looked = 0.0
        loading = LoadWatch(STUCK_SECONDS + _LOADING_GRACE)
        while not self.is_over.wait(min(CHECK_INTERVAL, self._watchdog.seconds_to_check())):
            if self._child is not None and self._child.is_silent():
                self._give_up("")
                return
            if not self.is_ready.is_set():
                self._watchdog.restart()
                if time.monotonic() - looked >= LOOK_SECONDS:
                    looked = time.monotonic()
                    loading.look([self._activity()])
                if loading.is_stuck:
                    self._give_up(f"{self._name()} made no progress in loading for {loading.patience:g} s")
                    return
                continue
            verdict = self._watchdog.check()
            if verdict is Verdict.PROBE:
                self._probe()
            elif verdict is Verdict.LOST:
                waited = f"{self._deployment.step_timeout + _GRACE:g} s"
                self._give_up(f"{self._name()} has not answered for {waited}: it is stopped or hangs in a step")
                return

    def describe_end(self) -> EngineFailed:
        """The failure of an engine that could not tell it."""
        if self._killed_because:
            return EngineFailed(self._killed_because, suspicious=True, stalled_for=self._silence)
        if self._child is None:
            return EngineFailed(f"{self._name()} has lost its connection", host_lost=True)
        words = f"{self._name()} {self._child.describe_end()}"
        return EngineFailed(words, suspicious=is_own_end(self._child.poll()))

    def _give_up(self, reason: str) -> None:
        self._killed_because, self._silence = reason, self._watchdog.silence
        if self._child is not None:
            self._child.kill()
        # A process that hangs in a driver outlives even this; the front must not wait for its end.
        self._cut_off()

    def _work(self) -> int:
        return self._remote.work if self._child is None else self._child.work

    def _activity(self) -> Activity:
        """What the engine has done while it loads. One that watches ranks reads much itself, so their work counts."""
        if self._deployment.executor != "uni" and (work := self._work()):
            return Activity(work)
        return self._remote if self._child is None else self._child.activity()

    def _name(self) -> str:
        """The engine, and its rank if it has no more than one: that runs in the engine's process."""
        grid = self._deployment.grid
        rank = f"{grid.place(0)} " if grid.world_size == 1 else ""
        host = self._deployment.machine.hosts[self._deployment.placements[self._replica][0].host].name
        pid = f", pid {self._child.pid}" if self._child else ""
        return f"engine {self._replica} ({rank}on {host}{pid})"
