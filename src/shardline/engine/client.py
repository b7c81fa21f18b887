"""The front's handle on one engine process (one data-parallel replica)."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from shardline.channel import Channel, encode_message
from shardline.deployment.deployment import Deployment
from shardline.engine.engine_watch import EngineWatch
from shardline.engine.start import StartedEngine
from shardline.messages.control import Command, Control, ControlDone, Probe
from shardline.messages.engine import (
    AbortRequests,
    AddRequests,
    EngineBeat,
    EngineFailed,
    EngineMessage,
    EngineOutputs,
    EngineReady,
    ResetPrefixCache,
    StopEngine,
)
from shardline.messages.request import Request

_log = logging.getLogger(__name__)


class EngineClient:
    """Starts an engine process and talks to it.

    A reader thread of this client calls `on_message` with every EngineOutputs. It calls it once with EngineFailed if
    the engine fails after it was ready, or if its process ends without being asked to. An engine that is ready but does
    not answer a probe in time is killed, and has failed.
    """

    def __init__(
        self,
        deployment: Deployment,
        replica: int,
        on_message: Callable[[EngineOutputs | EngineFailed], None],
        start: Callable[[Deployment, int, bytes], StartedEngine],
        secret: bytes,
    ) -> None:
        """`start` starts the engine's process, on this host or on another one. `secret`: see `StartEngine`."""
        started = start(deployment, replica, secret)
        self._child = started.child
        self._replica = replica
        self._channel: Channel[EngineMessage] = Channel(started.sock, EngineMessage)  # type: ignore[arg-type]
        self._on_message = on_message
        self._first: Future[EngineReady | EngineFailed] = Future()
        self._closing = False
        self._watch = EngineWatch(
            deployment, replica, started.child, lambda: self.control(Probe()), self._channel.shutdown
        )
        self._control_numbers = itertools.count(1)
        self._controls: dict[int, Future[tuple[bytes, ...]]] = {}
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name=f"engine-{replica}-writer", daemon=True).start()
        self._reader = threading.Thread(target=self._read, name=f"engine-{replica}-reader", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch.run, name=f"engine-{replica}-watchdog", daemon=True).start()

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        """Block until the engine can take requests.

        Raises:
            ValueError: the configuration is at fault.
            RuntimeError: the engine failed or ended.
            TimeoutError: it was not ready in time.
        """
        try:
            answer = self._first.result(timeout)
        except TimeoutError:
            raise TimeoutError(f"engine {self._replica} was not ready within {timeout:g} s") from None
        if isinstance(answer, EngineReady):
            return answer
        raise (ValueError if answer.user_error else RuntimeError)(answer.message)

    def add(self, requests: Sequence[Request]) -> None:
        """Hand requests to the engine. If it has ended, `on_message` says so.

        Raises:
            ValueError: a request cannot be sent; none of them was.
        """
        # One frame each: many choices of a long prompt must not add up to more than a frame may hold.
        for body in [encode_message(AddRequests([request])) for request in requests]:
            self._outbox.put(body)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests; outputs that have already been sent may still arrive."""
        self._outbox.put(encode_message(AbortRequests(list(request_ids))))

    def reset_prefix_cache(self) -> None:
        """Let requests that are added from now on find nothing in the prefix cache that is there now."""
        self._outbox.put(encode_message(ResetPrefixCache()))

    def control(self, command: Command) -> Future[tuple[bytes, ...]]:
        """Have all ranks execute a command between two steps. The result is what each rank's handler returns, encoded.

        The future raises ValueError if a rank refuses the command, and RuntimeError if the engine ends before.
        """
        number = next(self._control_numbers)
        answer = self._controls[number] = Future[tuple[bytes, ...]]()
        self._outbox.put(encode_message(Control.carry(number, command)))
        if self._watch.is_over.is_set():
            self._end_controls()
        return answer

    def _take_answer(self, done: ControlDone) -> None:
        if (answer := self._controls.pop(done.number, None)) is None:
            return
        if done.error:
            answer.set_exception(ValueError(done.error))
        else:
            answer.set_result(done.values)

    def _end_controls(self) -> None:
        """Nothing answers any more."""
        while self._controls:
            with contextlib.suppress(KeyError):  # the reader and a caller may both do this
                answer = self._controls.popitem()[1]
                answer.set_exception(RuntimeError(f"engine {self._replica} has ended"))

    def close(self, timeout: float = 10.0) -> None:
        """End the engine process and wait for it; it is killed if it does not end in time."""
        self._closing = True
        self._watch.is_over.set()
        self._outbox.put(encode_message(StopEngine()))
        self._outbox.put(None)
        if self._child is None:
            self._reader.join(timeout)
            self._channel.shutdown()
        elif not self._child.wait(timeout):
            _log.warning("engine %d did not end within %g s and is killed", self._replica, timeout)
            if not self._child.end(0.0):
                _log.error("engine %d (pid %d) hangs in the kernel and is left behind", self._replica, self._child.pid)
        self._reader.join(timeout=1.0)
        self._channel.close()

    def _write(self) -> None:
        """Send messages on a thread, so that the front does not wait while the engine is in the middle of a step."""
        # The reader thread sees the end of file and reports it, once.
        with contextlib.suppress(OSError):
            while (body := self._outbox.get()) is not None:
                self._channel.send_encoded(body)

    def _read(self) -> None:
        ready = False
        while True:
            try:
                message = self._channel.receive()
            except (EOFError, OSError, msgspec.MsgspecError):
                message = self._watch.describe_end()
            if isinstance(message, EngineBeat):
                self._watch.note_beat(message)
                continue
            self._watch.num_messages += 1
            if isinstance(message, EngineReady):
                ready = True
                self._watch.is_ready.set()
                self._first.set_result(message)
            elif isinstance(message, EngineOutputs):
                self._on_message(message)
            elif isinstance(message, ControlDone):
                self._take_answer(message)
            else:
                self._watch.is_over.set()
                self._end_controls()
                if not ready:
                    self._first.set_result(message)
                elif not self._closing:
                    self._on_message(message)
                return
