"""The simplest tier: it drops what was longest unused."""

from __future__ import annotations


class LruTier:
    """See `Tier`."""

    def __init__(self, num_slots: int) -> None:
        self.slots: dict[bytes, int] = {}
        """What it holds, in the order of use."""
        self.fetching: set[bytes] = set()
        self.num_stored = self.num_fetched = self.num_lost = 0
        self._free = list(range(num_slots))

    def find(self, key: bytes) -> bool:
        return key in self.slots

    def store(self, key: bytes) -> int | None:
        slot = self.slots.pop(key, None)
        if slot is not None:
            self.slots[key] = slot
            return None
        if not self._free:
            victim = next((other for other in self.slots if other not in self.fetching), None)
            if victim is None:
                return None
            self._free.append(self.slots.pop(victim))
        self.slots[key] = slot = self._free.pop()
        self.num_stored += 1
        return slot

    def fetch(self, key: bytes) -> int:
        assert key not in self.fetching
        self.fetching.add(key)
        self.slots[key] = slot = self.slots.pop(key)
        return slot

    def release(self, key: bytes) -> None:
        self.fetching.remove(key)
        self.num_fetched += 1

    def drop(self, key: bytes) -> None:
        self.fetching.remove(key)
        self._free.append(self.slots.pop(key))
        self.num_lost += 1
