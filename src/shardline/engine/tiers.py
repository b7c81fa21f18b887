"""A second tier of the KV cache: it keeps the content of blocks that the pool evicts, until a prefix needs it again.

The engine decides here what a tier holds, and in which of its slots. The ranks have the memory of the slots
(`runtime.kv_store.TierMemory`), each for its own part of a block, and run the copies of each plan in order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardline.engine.block_pool import BlockPool
from shardline.messages.step import BlockCopies, BlockCopy

_GROUP_BYTES = 2


def content_key(block_hash: bytes, group: int) -> bytes:
    """What the pool and a tier know the content of a block by: the hash of its tokens, and its KV group."""
    return block_hash + group.to_bytes(_GROUP_BYTES, "little")


def split_key(key: bytes) -> tuple[bytes, int]:
    """The hash and the KV group of a `content_key`."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "little")


class Tier(Protocol):
    """What a tier holds, by `content_key`. A slot may be given to other content once nothing is fetched from it."""

    def find(self, key: bytes) -> bool:
        """Whether it holds the content, as far as is known: ranks may still find that they have lost it."""

    def store(self, key: bytes) -> int | None:
        """The slot to which the content must be copied now; None: it is held already, or there is no room for it."""

    def fetch(self, key: bytes) -> int:
        """The slot of content that `find` has found, which keeps it until `release` or `drop`."""

    def release(self, key: bytes) -> None:
        """Content was fetched."""

    def drop(self, key: bytes) -> None:
        """Content could not be fetched: forget it."""


@dataclass(frozen=True)
class _Fetch:
    """What is held until the plans that fetch a prefix are over."""

    last_step: int
    shared: list[int]
    """The blocks of the prefix that the pool had."""
    arriving: list[tuple[bytes, BlockCopy]]


class BlockTraffic:
    """Moves the content of blocks between the pool and a tier, by copies that plans carry.

    Content that the pool evicts goes to the tier. A plan copies it before anything overwrites the block. A prefix of
    which the tier has a part can be fetched: it is in the pool once the plan with the copies is over, unless ranks have
    lost it. Until then no step reads it. All its blocks are held meanwhile, whoever gives up waiting for them.
    """

    def __init__(self, pool: BlockPool, tier: Tier | None) -> None:
        """Without a tier, there is nothing to copy."""
        self._pool = pool
        self._tier = tier
        self._copies: BlockCopies | None = None
        """Those of the plan in the making."""
        self._fetches: list[_Fetch] = []
        self._arriving: dict[bytes, int] = {}
        """The plan that fetches each key."""
        if tier is not None:
            pool.on_evict = self._store

    @property
    def has_tier(self) -> bool:
        """Whether evicted content is kept, and may be fetched."""
        return self._tier is not None

    @property
    def is_fetching(self) -> bool:
        """Whether blocks are held for fetches."""
        return bool(self._fetches)

    def can_fetch(self, key: bytes) -> bool:
        """Whether the tier has the content, or a plan already fetches it."""
        assert self._tier is not None
        return key in self._arriving or self._tier.find(key)

    def fetch(self, shared: list[int], keys: Sequence[bytes], step_id: int) -> int:
        """Begin to fetch the keys of a prefix, by the plan with this id if no earlier one does it.

        `shared`: the blocks of the prefix that the pool has. There must be free blocks for the others. Returns the
        plan after which all is in the pool.
        """
        assert self._tier is not None
        for block in shared:
            self._pool.share_block(block)
        missing = [key for key in keys if key not in self._arriving]
        # A block that is taken may evict content, for which the tier must not choose these slots.
        slots = [self._tier.fetch(key) for key in missing]
        copies = [
            BlockCopy(split_key(key)[1], self._pool.take_block(), slot)
            for key, slot in zip(missing, slots, strict=True)
        ]
        self._open_copies().fetches.extend(copies)
        self._arriving.update(dict.fromkeys(missing, step_id))
        last_step = max(self._arriving[key] for key in keys)
        self._fetches.append(_Fetch(last_step, shared, list(zip(missing, copies, strict=True))))
        return last_step

    @property
    def has_copies(self) -> bool:
        """Whether the next plan must carry copies."""
        return self._copies is not None

    def take_copies(self) -> BlockCopies | None:
        """The copies that the next plan must carry; None: there are none."""
        copies, self._copies = self._copies, None
        return copies

    def _open_copies(self) -> BlockCopies:
        if self._copies is None:
            self._copies = BlockCopies([], [])
        return self._copies

    def finish_fetches(self, step_id: int, lost_slots: Collection[int]) -> None:
        """The plan with this id is over: the pool has what was fetched, except from the slots that were lost."""
        assert self._tier is not None
        over = [fetch for fetch in self._fetches if fetch.last_step == step_id]
        self._fetches = [fetch for fetch in self._fetches if fetch.last_step != step_id]
        for fetch in over:
            for key, copy in fetch.arriving:
                del self._arriving[key]
                if copy.slot in lost_slots:
                    self._tier.drop(key)
                else:
                    self._tier.release(key)
                    self._pool.publish_block(copy.block, key)
            self._release(copy.block for _, copy in fetch.arriving)
            self._release(fetch.shared)

    def _release(self, blocks: Iterable[int]) -> None:
        """The last blocks of a prefix are re-used first."""
        for block in reversed(list(blocks)):
            self._pool.release_block(block)

    def _store(self, key: bytes, block: int) -> None:
        assert self._tier is not None
        slot = self._tier.store(key)
        if slot is not None:
            self._open_copies().stores.append(BlockCopy(split_key(key)[1], block, slot))
