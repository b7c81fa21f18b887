"""The pool of KV blocks: who holds them, and whose content can still be found."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Sequence

from shardline.engine.release_order import ReleaseOrder

NULL_BLOCK = 0
"""Fills places of block tables that are never read; it is never handed out."""


class BlockPool:
    """Reference-counted blocks 1 .. num_blocks - 1, every operation O(1) on average.

    A block that nobody holds is free. A free block keeps its published content until it is handed out again, and can
    be shared until then. Blocks without content are handed out first, then the least recently released ones.

    A block takes little memory, because simulations have pools of thousands of replicas.
    """

    num_ranks = 1
    """Ranks that share the keys of a request."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"the KV cache needs at least 2 blocks (one is reserved), got {num_blocks}")
        self.num_usable = num_blocks - 1
        self.on_evict: Callable[[bytes, int], None] | None = None
        """Called with content and its block before the block is handed out and loses it; None: nobody keeps it."""
        self._references = array("I", bytes(4 * num_blocks))
        self._contents: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._numbers = _block_numbers(num_blocks)
        self._num_reserved = 0
        """Free blocks that are promised to somebody."""
        self._num_touched = 1
        """Blocks from this one on were never handed out."""
        self._blank: list[int] = []
        """Other free blocks without content."""
        self._num_cached = 0
        """Free blocks with content."""
        self._released = ReleaseOrder(num_blocks)
        """Those of them, and blocks that are held again."""

    @property
    def num_free(self) -> int:
        """Blocks that `take_block` can hand out, with cached content or without."""
        return len(self._blank) + self._num_cached + len(self._contents) - self._num_touched - self._num_reserved

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_usable - self.num_free

    def num_references(self, block: int) -> int:
        """How many holders the block has."""
        return self._references[block]

    def reserve_block(self, rank: int = 0) -> None:
        """Promise a free block of a rank, which keeps its content until `take_reserved` hands it out."""
        assert self.num_free, "more blocks were promised than there are"
        self._num_reserved += 1

    def take_reserved(self, rank: int = 0) -> int:
        """Hand out a block that was promised, as `take_block` does."""
        self._num_reserved -= 1
        return self.take_block()

    def fewest(self, blocks: Sequence[int]) -> int:
        """How many blocks these are at least. All are of one rank here, see `ContextPool`."""
        return len(blocks)

    def most(self, blocks: Sequence[int]) -> int:
        """How many blocks these are at most."""
        return len(blocks)

    def reach(self, length: int, num_tables: int) -> int:
        """The length to which `num_tables` tables of this length can grow."""
        return length + self.num_free // num_tables

    def take_block(self, place: int = 0) -> int:
        """Hand out a block without content, with the caller as its only holder. There must be a free one. `place`: in
        a sequence's table."""
        if self._blank:
            block = self._blank.pop()
        elif self._num_touched < len(self._contents):
            block = self._numbers[self._num_touched]
            self._num_touched += 1
        else:
            block = self._take_cached()
        self._references[block] = 1
        return block

    def _take_cached(self) -> int:
        """The least recently released block with content; it loses its content."""
        block = self._released.take(self._references)
        self._num_cached -= 1
        content = self._contents[block]
        assert content is not None
        if self.on_evict is not None:
            self.on_evict(content, block)
        del self._published[content]
        self._contents[block] = None
        return block

    def share_block(self, block: int) -> None:
        """Add a holder to a published block."""
        if self._references[block] == 0:
            self._num_cached -= 1
        self._references[block] += 1

    def release_block(self, block: int) -> None:
        """Undo one `take_block` or `share_block`. Blocks with content are re-used in the order of release."""
        references = self._references[block] - 1
        assert references >= 0, "a free block was released"
        self._references[block] = references
        if references == 0:
            if self._contents[block] is None:
                self._blank.append(block)
            else:
                self._released.add(block, self._references)
                self._num_cached += 1

    def publish_block(self, block: int, content: bytes) -> None:
        """Let `find_block` find a held block by its content. If another block has the same content, that one is found
        as before."""
        assert self._references[block] > 0, "a free block was published"
        assert self._contents[block] is None, "a block was published twice"
        if content not in self._published:
            self._published[content] = block
            self._contents[block] = content

    def find_block(self, content: bytes) -> int | None:
        """The block with this content, held or free."""
        return self._published.get(content)


@functools.lru_cache(maxsize=4)
def _block_numbers(num_blocks: int) -> tuple[int, ...]:
    """0 .. num_blocks - 1. Pools of equal size share these objects, which would be a fifth of their memory."""
    return tuple(range(num_blocks))
