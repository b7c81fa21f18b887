"""Which cached block is handed out next: the one that was released least recently."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence


class ReleaseOrder:
    """Blocks in the order of their release. One that is held again stays, but does not count, so that it costs nothing
    to share a block. `references`: the number of holders of each block.

    It takes little memory, as `BlockPool` does.
    """

    def __init__(self, num_blocks: int) -> None:
        self._released: deque[int] = deque()
        """Only the last entry of a free block counts."""
        self._num_entries = array("I", bytes(4 * num_blocks))
        """For each block its entries in `_released`."""

    def add(self, block: int, references: Sequence[int]) -> None:
        """A block was released."""
        self._released.append(block)
        self._num_entries[block] += 1
        if len(self._released) > 2 * len(self._num_entries):
            self._drop_old_entries(references)

    def take(self, references: Sequence[int]) -> int:
        """Remove and return the first block that is free. There must be one."""
        while True:
            block = self._released.popleft()
            self._num_entries[block] -= 1
            if not self._num_entries[block] and not references[block]:
                return block

    def _drop_old_entries(self, references: Sequence[int]) -> None:
        entries, kept = self._num_entries, []
        for block in self._released:
            entries[block] -= 1
            if not entries[block] and not references[block]:
                kept.append(block)
        for block in kept:
            entries[block] = 1
        self._released = deque(kept)
