"""Where ranks find each other: values that they hand to one another through their engine."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from shardline.messages.worker import StoreAdd, StoreCount, StoreGet, StoreSet, StoreValue


class ControlStore:
    """A store of keys and values. The engine keeps them; they travel over the rank's own channel to it.

    Any thread may call its methods.
    """

    def __init__(self, send: Callable[[StoreSet | StoreGet | StoreAdd], None]) -> None:
        self._send = send
        self._values: dict[str, bytes] = {}
        self._misses: Counter[str] = Counter()
        """How often the engine has answered that a key has no value yet."""
        self._counts: dict[str, int] = {}
        self._arrived = threading.Condition()
        self._counting = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        """Hand a value to the ranks that ask for it. A key is set once."""
        self._send(StoreSet(key, value))

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value of a key, as soon as some rank has set it.

        Raises:
            TimeoutError: no rank has set it within `timeout_s` seconds, or the engine does not answer.
        """
        with self._arrived:
            if key not in self._values:
                self._send(StoreGet(key))
                self._wait(lambda: key in self._values, f"no rank has set {key}", timeout_s)
            return self._values[key]

    def find(self, key: str, timeout_s: float) -> bytes | None:
        """The value of a key; None: no rank has set it yet.

        Raises:
            TimeoutError: the engine does not answer.
        """
        with self._arrived:
            if key not in self._values:
                known = self._misses[key]
                self._send(StoreGet(key, waits=False))
                self._wait(lambda: key in self._values or self._misses[key] > known, "the engine is silent", timeout_s)
            return self._values.get(key)

    def add(self, key: str, amount: int, timeout_s: float) -> int:
        """Add to the counter of this name, which all ranks share and which begins at 0; returns the sum.

        Raises:
            TimeoutError: the engine does not answer.
        """
        with self._counting, self._arrived:
            self._counts.pop(key, None)
            self._send(StoreAdd(key, amount))
            self._wait(lambda: key in self._counts, "the engine is silent", timeout_s)
            return self._counts[key]

    def share(self, name: str, own: bytes, rank: int, num_ranks: int, timeout_s: float) -> list[bytes]:
        """What each rank hands out under a name, in their order.

        Raises:
            TimeoutError: a rank does not, within `timeout_s` seconds.
        """
        self.set(f"{name} of rank {rank}", own)
        return [self.get(f"{name} of rank {other}", timeout_s) for other in range(num_ranks)]

    def put_answer(self, message: StoreValue | StoreCount) -> None:
        """Take an answer of the engine. The thread that reads the channel calls this."""
        with self._arrived:
            if isinstance(message, StoreCount):
                self._counts[message.key] = message.value
            elif message.value is None:
                self._misses[message.key] += 1
            else:
                self._values[message.key] = message.value
            self._arrived.notify_all()

    def _wait(self, is_there: Callable[[], bool], problem: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_there():
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError(f"{problem} within {timeout_s:g} s")
            self._arrived.wait(left)
