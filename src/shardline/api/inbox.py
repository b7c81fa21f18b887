"""Carries the events of engines to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from shardline.api.engines import EngineEvent


class Inbox:
    """Carries engine events from the clients' reader threads to the event loop, several at once.

    Events that arrive before `open` are kept until then.
    """

    def __init__(self, deliver: Callable[[int, EngineEvent], None]) -> None:
        self._deliver = deliver
        self._events: deque[tuple[int, EngineEvent]] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wakeup_pending = False

    def put_event(self, index: int, event: EngineEvent) -> None:
        """Add an event of replica `index`; any thread may call this."""
        with self._lock:
            self._events.append((index, event))
            self._wake_loop()

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to deliver events on this loop."""
        with self._lock:
            self._loop = loop
            self._wake_loop()

    def close(self) -> None:
        """Stop delivering events."""
        with self._lock:
            self._loop = None

    def _wake_loop(self) -> None:
        if self._events and self._loop is not None and not self._wakeup_pending and not self._loop.is_closed():
            self._wakeup_pending = True
            self._loop.call_soon_threadsafe(self._deliver_events)

    def _deliver_events(self) -> None:
        with self._lock:
            self._wakeup_pending = False
            events, self._events = self._events, deque()
        try:
            while events:
                self._deliver(*events.popleft())
        finally:
            if events:  # one failed; the others belong to other requests
                with self._lock:
                    self._events.extendleft(reversed(events))
                    self._wake_loop()
