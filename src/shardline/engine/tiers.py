"""A second tier of the KV cache: it keeps the content of blocks that the pool evicts, until a prefix needs it again.

The engine decides here what a tier holds, and in which of its slots. The ranks have the memory of the slots
(`runtime.tiers`), each for its own part of a block, and run the copies of each plan in order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardline.config.fields import format_bytes
from shardline.deployment.block_folder import layout_digest, rank_folder
from shardline.deployment.deployment import Deployment
from shardline.engine.block_pool import BlockPool
from shardline.engine.context_pool import ContextPool
from shardline.engine.tier_files import FileIndex
from shardline.messages.copies import BlockCopies, BlockCopy, CopyCounts, CopyResult
from shardline.messages.stats import TierStats

_FETCH_BYTES = 16 << 20
"""What a rank copies back in one step: a few milliseconds, which sequences that compute can bear."""
_GROUP_BYTES = 2
_log = logging.getLogger(__name__)


def content_key(block_hash: bytes, group: int) -> bytes:
    """What the pool and a tier know the content of a block by: the hash of its tokens, and its KV group."""
    return block_hash + group.to_bytes(_GROUP_BYTES, "little")


def split_key(key: bytes) -> tuple[bytes, int]:
    """The hash and the KV group of a `content_key`."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "little")


class KnownFiles(Protocol):
    """Which content is in files behind a tier, as far as is known."""

    def __contains__(self, key: bytes) -> bool: ...
    def add(self, key: bytes) -> None:
        """Ranks write the content to a file."""

    def discard(self, key: bytes) -> None:
        """It is not there."""


class Tier:
    """What a tier holds, by `content_key`. What is longest unused makes room; what is being fetched keeps its slot."""

    def __init__(self, num_slots: int, files: KnownFiles | None = None, num_ranks: int = 1) -> None:
        """`files`: what ranks read into a slot where the slot has something else; None: they have no files. `num_ranks`
        that share the keys of a request have a slot in turns, as in `ContextPool`."""
        self.num_slots, self._num_ranks = num_slots, num_ranks
        self._slots: dict[bytes, int] = {}
        """In the order of use."""
        self._fetching: set[bytes] = set()
        self._free = [list(range(rank, num_slots, num_ranks)) for rank in range(num_ranks)]
        self._files = files

    @property
    def num_used(self) -> int:
        """Slots that hold something."""
        return len(self._slots)

    def find(self, key: bytes) -> bool:
        """Whether it holds the content, as far as is known: ranks may still find that they have lost it."""
        return key in self._slots or (self._files is not None and key in self._files)

    def store(self, key: bytes, rank: int = 0) -> int | None:
        """The slot of a rank to which its content must be copied now; None: it is held already, or there is no room."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._slots[key] = slot
            return None
        slot = self._take_slot(key, rank)
        if slot is not None and self._files is not None:
            self._files.add(key)
        return slot

    def fetch(self, key: bytes, rank: int = 0) -> int | None:
        """The slot of a rank's content that `find` has found, which keeps it until `release` or `drop`; None: it must
        be read from a file, and all slots are in use."""
        assert key not in self._fetching
        slot = self._slots.pop(key, None)
        if slot is None:
            slot = self._take_slot(key, rank)
        else:
            self._slots[key] = slot
        if slot is not None:
            self._fetching.add(key)
        return slot

    def _take_slot(self, key: bytes, rank: int) -> int | None:
        if not self._free[rank]:
            own = (other for other, slot in self._slots.items() if slot % self._num_ranks == rank)
            victim = next((other for other in own if other not in self._fetching), None)
            if victim is None:
                return None
            self._free[rank].append(self._slots.pop(victim))
        self._slots[key] = slot = self._free[rank].pop()
        return slot

    def release(self, key: bytes) -> None:
        """Content was fetched."""
        self._fetching.remove(key)

    def drop(self, key: bytes) -> None:
        """Content could not be fetched: forget it."""
        self._fetching.remove(key)
        slot = self._slots.pop(key)
        self._free[slot % self._num_ranks].append(slot)
        if self._files is not None:
            self._files.discard(key)


@dataclass(eq=False)
class _Fetch:
    """A part of a prefix that somebody waits for."""

    ticket: int
    held: list[int]
    """Blocks of the prefix that the pool has."""
    missing: set[bytes]
    """What is still on its way."""


class BlockTraffic:
    """Moves the content of blocks between the pool and a tier, by copies that plans carry.

    Content that the pool evicts goes to the tier. A plan copies it before anything overwrites the block. A prefix of
    which the tier has a part can be fetched: each plan fetches a few blocks, and they are in the pool once the plan is
    over, unless ranks have lost them. Until then no step reads them. All blocks of the prefix are held meanwhile,
    whoever gives up waiting for them.
    """

    def __init__(self, pool: BlockPool | ContextPool, tier: Tier, most_fetches: int) -> None:
        """`most_fetches`: blocks that may be on their way at a time, so that no plan waits for many."""
        self._pool = pool
        self.tier = tier
        self._most_fetches = most_fetches
        self._num_tickets = 0
        self._stores: list[BlockCopy] = []
        """Those of the plan in the making."""
        self._wanted: deque[tuple[bytes, int]] = deque()
        """Keys that no plan has fetched yet, in order, with their slots; a block is reserved for each."""
        self._late: list[BlockCopy] = []
        """Fetches that the next plan must repeat."""
        self._flying: dict[int, list[BlockCopy]] = {}
        """The fetches of each plan."""
        self._num_flying = 0
        self._waiting: dict[bytes, list[_Fetch]] = {}
        """Who waits for each key on its way."""
        self.is_fetching = False
        """Whether blocks are held for fetches."""
        self.num_queries = self.num_hits = 0
        """Tokens of prefixes that the pool did not have, and those of them that came from the tier."""
        self.num_lost = 0
        """Blocks that a rank had lost."""
        self.counts = CopyCounts()
        """Summed over ranks."""
        pool.on_evict = self._store

    def stats(self) -> TierStats:
        """Counters since the start, and what the tier holds now."""
        num_slots, num_used = self.tier.num_slots, self.tier.num_used
        return TierStats(num_slots, num_used, self.num_queries, self.num_hits, self.num_lost, self.counts)

    def can_fetch(self, key: bytes) -> bool:
        """Whether the tier has the content, or it is on its way already."""
        return key in self._waiting or self.tier.find(key)

    def fetch(self, shared: list[int], keys: Mapping[bytes, int]) -> int | None:
        """Begin to fetch the keys of a prefix that are not on their way. Each is of one rank, see `PrefixHit.absent`.

        `shared`: the blocks of the prefix that the pool has. There must be free blocks for the others. Returns the
        ticket that `finish_plan` gives back once nothing is missing; None: the tier has no room to fetch anything.
        """
        for block in shared:
            self._pool.share_block(block)
        arriving: set[bytes] = set()
        for key, rank in keys.items():
            if key not in self._waiting:
                slot = self.tier.fetch(key, rank)
                if slot is None:
                    break
                self._pool.reserve_block(rank)
                self._wanted.append((key, slot))
            arriving.add(key)
        if not arriving:
            self._release(shared)
            return None
        self._num_tickets += 1
        fetch = _Fetch(self._num_tickets, shared, arriving)
        for key in arriving:
            self._waiting.setdefault(key, []).append(fetch)
        self.is_fetching = True
        return fetch.ticket

    @property
    def has_copies(self) -> bool:
        """Whether the next plan must carry copies."""
        return bool(self._stores or self._late or (self._wanted and self._num_flying < self._most_fetches))

    def take_copies(self, step_id: int) -> BlockCopies | None:
        """The copies that the plan with this id must carry; None: there are none."""
        if not self.has_copies:
            return None
        fetches, self._late = self._late, []
        while self._wanted and self._num_flying + len(fetches) < self._most_fetches:
            key, slot = self._wanted.popleft()
            # The block may evict content, which becomes a store of this plan.
            block = self._pool.take_reserved(slot % self._pool.num_ranks)
            fetches.append(BlockCopy(split_key(key)[1], block, slot, key))
        self._flying[step_id] = fetches
        self._num_flying += len(fetches)
        stores, self._stores = self._stores, []
        return BlockCopies(stores, fetches)

    def finish_plan(self, step_id: int, result: CopyResult) -> list[int]:
        """The plan with this id is over: the pool has what was fetched, unless a rank has lost it. Returns the tickets
        for which nothing is missing any more."""
        self.counts += result.counts
        done: list[int] = []
        for copy in self._flying.pop(step_id):
            self._num_flying -= 1
            if copy.slot in result.lost_slots:
                self.num_lost += 1
                self.tier.drop(copy.key)
            elif copy.slot in result.late_slots:
                self._late.append(copy)
                continue
            else:
                self.tier.release(copy.key)
                self._pool.publish_block(copy.block, copy.key)
            done += self._settle(copy)
        return done

    def _settle(self, copy: BlockCopy) -> Iterable[int]:
        """Content is in the pool, or lost. Returns the tickets that waited for it alone."""
        block = self._pool.find_block(copy.key)
        for fetch in self._waiting.pop(copy.key):
            fetch.missing.remove(copy.key)
            if block is not None:
                self._pool.share_block(block)
                fetch.held.append(block)
            if not fetch.missing:
                self._release(fetch.held)
                yield fetch.ticket
        self._pool.release_block(copy.block)
        self.is_fetching = bool(self._waiting)

    def _release(self, blocks: Sequence[int]) -> None:
        """The last blocks of a prefix are re-used first."""
        for block in reversed(blocks):
            self._pool.release_block(block)

    def _store(self, key: bytes, block: int) -> None:
        slot = self.tier.store(key, block % self._pool.num_ranks)
        if slot is not None:
            self._stores.append(BlockCopy(split_key(key)[1], block, slot, key))


def open_tiers(deployment: Deployment, replicas: Sequence[Callable[[Tier, int], None]]) -> FileIndex | None:
    """Give each replica of an engine its tier, if the deployment has them: `KVCache.add_tier`. All know the same files,
    which are returned; None: there are none."""
    plan = deployment.cache.tier
    if not plan.num_slots:
        return None
    index, files = None, ""
    if plan.folder:
        # An engine is on the host of its first rank. Ranks that share keys have unlike files.
        places, layout = map(deployment.grid.place, range(deployment.cache.context)), layout_digest(deployment)
        index = FileIndex(*(rank_folder(Path(plan.folder), layout, place) for place in places))
        size = format_bytes(plan.folder_bytes)
        files = f", and files of up to {size} a host in {plan.folder}, which has {len(index):,} for this layout"
    each = " a replica" if len(deployment.placements) * deployment.grid.data > 1 else ""
    memory = format_bytes(plan.num_bytes)
    _log.info("KV offloading: %s blocks in %s of host memory%s%s", f"{plan.num_slots:,}", memory, each, files)
    most = max(1, _FETCH_BYTES // max(deployment.cache.block_bytes))
    for add_tier in replicas:
        add_tier(Tier(plan.num_slots, index, deployment.cache.context), most)
    return index
