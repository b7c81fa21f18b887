"""The pool of KV blocks of ranks that share the keys of a request: each rank has the blocks of its own splits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from shardline.engine.block_pool import BlockPool


class ContextPool:
    """As `BlockPool`, with blocks of several ranks: block b is block b // ranks of rank b % ranks.

    The blocks of split i of a sequence, `of_split` of them, are of rank i % ranks. Numbers that say how many blocks are
    free, needed or held are `num_ranks` times those of the rank that has too few first. So what fits by them fits on
    every rank, wherever a sequence goes on.
    """

    def __init__(self, num_blocks: int, num_ranks: int, of_split: int) -> None:
        """`num_blocks` is a multiple of `num_ranks`, whose first blocks are never handed out."""
        self.num_ranks = num_ranks
        self._of_split = of_split
        self._pools = [BlockPool(num_blocks // num_ranks) for _ in range(num_ranks)]
        self.num_usable = sum(pool.num_usable for pool in self._pools)
        self._keep: Callable[[bytes, int], None] | None = None

    @property
    def on_evict(self) -> Callable[[bytes, int], None] | None:
        """See `BlockPool.on_evict`."""
        return self._keep

    @on_evict.setter
    def on_evict(self, keep: Callable[[bytes, int], None] | None) -> None:
        self._keep = keep
        for rank, pool in enumerate(self._pools):
            pool.on_evict = None if keep is None else partial(self._evict, keep, rank)

    def _evict(self, keep: Callable[[bytes, int], None], rank: int, content: bytes, block: int) -> None:
        keep(content, block * self.num_ranks + rank)

    @property
    def num_free(self) -> int:
        """See the class."""
        return self.num_ranks * min(pool.num_free for pool in self._pools)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds, of all ranks."""
        return sum(pool.num_used for pool in self._pools)

    def num_references(self, block: int) -> int:
        """How many holders the block has."""
        return self._pools[block % self.num_ranks].num_references(block // self.num_ranks)

    def fewest(self, blocks: Sequence[int]) -> int:
        """How many blocks these are at least, see the class."""
        return self.num_ranks * min(self._counts(blocks))

    def most(self, blocks: Sequence[int]) -> int:
        """How many blocks these are at most, see the class."""
        return self.num_ranks * max(self._counts(blocks))

    def _counts(self, blocks: Sequence[int]) -> list[int]:
        counts = [0] * self.num_ranks
        for block in blocks:
            counts[block % self.num_ranks] += 1
        return counts

    def reach(self, length: int, num_tables: int) -> int:
        """See `BlockPool.reach`."""
        free = [pool.num_free // num_tables for pool in self._pools]
        while True:
            rank = self._rank_at(length)
            taken = min(free[rank], self._of_split - length % self._of_split)
            free[rank] -= taken
            length += taken
            if length % self._of_split or taken == 0:
                return length

    def reserve_block(self, rank: int) -> None:
        """See `BlockPool.reserve_block`."""
        self._pools[rank].reserve_block()

    def take_reserved(self, rank: int) -> int:
        """See `BlockPool.take_reserved`."""
        return self._pools[rank].take_reserved() * self.num_ranks + rank

    def take_block(self, place: int) -> int:
        """See `BlockPool.take_block`."""
        rank = self._rank_at(place)
        return self._pools[rank].take_block() * self.num_ranks + rank

    def _rank_at(self, place: int) -> int:
        return place // self._of_split % self.num_ranks

    def share_block(self, block: int) -> None:
        """See `BlockPool.share_block`."""
        self._pools[block % self.num_ranks].share_block(block // self.num_ranks)

    def release_block(self, block: int) -> None:
        """See `BlockPool.release_block`."""
        self._pools[block % self.num_ranks].release_block(block // self.num_ranks)

    def publish_block(self, block: int, content: bytes) -> None:
        """See `BlockPool.publish_block`. Equal content has equal places, so it is of one rank."""
        self._pools[block % self.num_ranks].publish_block(block // self.num_ranks, content)

    def find_block(self, content: bytes) -> int | None:
        """See `BlockPool.find_block`."""
        for rank, pool in enumerate(self._pools):
            block = pool.find_block(content)
            if block is not None:
                return block * self.num_ranks + rank
        return None
