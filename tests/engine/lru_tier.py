"""A tier that counts what happens to it."""

from __future__ import annotations

from shardline.engine.tiers import Tier


class CountingTier(Tier):
    """See `Tier`."""

    def __init__(self, num_slots: int, files: set[bytes] | None = None, num_ranks: int = 1) -> None:
        super().__init__(num_slots, files, num_ranks)
        self.num_stored = self.num_fetched = self.num_lost = 0

    @property
    def slots(self) -> dict[bytes, int]:
        """What it holds."""
        return self._slots

    @property
    def fetching(self) -> set[bytes]:
        """What keeps its slot."""
        return self._fetching

    def store(self, key: bytes, rank: int = 0) -> int | None:
        slot = super().store(key, rank)
        self.num_stored += slot is not None
        return slot

    def release(self, key: bytes) -> None:
        super().release(key)
        self.num_fetched += 1

    def drop(self, key: bytes) -> None:
        super().drop(key)
        self.num_lost += 1
