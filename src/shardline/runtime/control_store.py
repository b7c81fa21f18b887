"""Where ranks find each other: values that they hand to one another through their engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shardline.deployment.messages import StoreGet, StoreSet, StoreValue


class ControlStore:
    """A store of keys and values. The engine keeps them; they travel over the rank's own channel to it."""

    def __init__(self, send: Callable[[StoreSet | StoreGet], None]) -> None:
        self._send = send
        self._values: dict[str, bytes] = {}
        self._arrived = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Hand a value to the ranks that ask for it."""
        self._send(StoreSet(key, value))

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value of a key, as soon as some rank has set it.

        Raises:
            TimeoutError: no rank has set it within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        with self._arrived:
            if key not in self._values:
                self._send(StoreGet(key))
            while key not in self._values:
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError(f"no rank has set {key} within {timeout_s:g} s")
                self._arrived.wait(left)
            return self._values[key]

    def put_value(self, message: StoreValue) -> None:
        """Take an answer of the engine. The thread that reads the channel calls this."""
        with self._arrived:
            self._values[message.key] = message.value
            self._arrived.notify_all()
