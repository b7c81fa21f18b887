"""The engine's store of keys and values, in which its ranks find each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shardline.messages.worker import StoreAdd, StoreCount, StoreGet, StoreSet, StoreValue


class RankStore:
    """Keeps values, and the ranks that wait for one."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self._awaiting: dict[str, list[int]] = {}
        """For each key that has no value, the ranks that wait for it."""

    @property
    def waiting(self) -> Collection[int]:
        """The ranks that wait for a value of another rank."""
        return {rank for ranks in self._awaiting.values() for rank in ranks}

    def handle(
        self, rank: int, message: StoreSet | StoreGet | StoreAdd
    ) -> Iterator[tuple[int, StoreValue | StoreCount]]:
        """The answers to a message of a rank: each for a rank, which may be another one."""
        key = message.key
        if isinstance(message, StoreSet):
            self._values[key] = message.value
            for asking in self._awaiting.pop(key, []):
                yield asking, StoreValue(key, message.value)
        elif isinstance(message, StoreAdd):
            self._counts[key] = self._counts.get(key, 0) + message.amount
            yield rank, StoreCount(key, self._counts[key])
        elif message.waits and key not in self._values:
            self._awaiting.setdefault(key, []).append(rank)
        else:
            yield rank, StoreValue(key, self._values.get(key))
