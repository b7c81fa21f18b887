"""The store over which torch.distributed's groups form: the engine's, so that nothing listens for it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from shardline.runtime.control_store import ControlStore


class TorchStore(Store):
    """The values and counters of a ControlStore. torch calls these methods, from threads of its own too."""

    def __init__(self, store: ControlStore, timeout: float) -> None:
        """`timeout`: seconds after which ranks that have set no value count as missing."""
        super().__init__()
        self._store = store
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._store.set(key, value if isinstance(value, bytes) else value.encode())

    def get(self, key: str) -> bytes:
        """The value of a key; waits until it is set.

        Raises:
            DistStoreError: it is not set in time.
        """
        return self._get(key, self._timeout)

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return the sum."""
        try:
            return self._store.add(key, value, self._timeout)
        except TimeoutError as error:
            raise DistStoreError(f"timed out: {error}") from None

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have a value."""
        return all(self._store.find(key, self._timeout) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value.

        Raises:
            DistStoreError: one has none in time.
        """
        seconds = self._timeout if timeout is None else min(self._timeout, timeout.total_seconds())
        for key in keys:
            self._get(key, seconds)

    def delete_key(self, key: str) -> bool:
        """Whether the key was deleted: never, since the engine's store ends with the engine."""
        return False

    def clone(self) -> TorchStore:
        """A store for another thread of torch: this one, since any thread may call it."""
        return self

    def _get(self, key: str, seconds: float) -> bytes:
        try:
            return self._store.get(key, seconds)
        except TimeoutError as error:
            # torch retries and words errors of this type only.
            raise DistStoreError(f"timed out: {error}") from None
