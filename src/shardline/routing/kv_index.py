"""Which beginnings of prompts the caches of replicas hold, by the events that they publish."""

from __future__ import annotations

import functools
import sys
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from shardline.messages.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent

ENTRY_BYTES = 640
"""About what one block of one cache takes here."""
_PIECE = 64
"""Blocks of a prompt that are hashed before it is looked whether anybody has them."""


class _Block(NamedTuple):
    """A block as its cache names it."""

    replica: int
    rank: int
    group: int
    name: BlockHash


@dataclass(eq=False, slots=True)
class _Holding:
    """A block that a cache holds, or has held."""

    replica: int
    chain: int
    """What the block and all before it hold, under a name that is the same for all caches."""
    parent: _Holding | None
    """The block before it in the same cache."""
    media: tuple[str | None, ...] = ()
    """Where it is; empty: it is gone."""
    num_children: int = 0
    """Blocks after it that the cache holds."""


@dataclass(eq=False, slots=True)
class _Holders:
    """Where the same tokens are, after the same ones."""

    blocks: tuple[_Block, ...]
    replicas: frozenset[int]
    used: int
    """How many blocks had been stored when it, and all before it, were last noted as used."""

    def change(self, blocks: tuple[_Block, ...]) -> None:
        """They have these blocks now."""
        self.blocks, self.replicas = blocks, _shared(frozenset(block.replica for block in blocks))


class KVIndex:
    """The blocks of all caches; those that were neither stored nor asked for lately are forgotten.

    Caches name blocks each in its own way, so tokens are hashed again here. Of several KV groups, a block counts if one
    has it. Who holds a block mostly holds all before it, so of a prompt's blocks few are looked up.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        """`max_bytes`: about as much memory is used."""
        self._most = max(1, max_bytes // ENTRY_BYTES)
        self._held: dict[_Block, _Holding] = {}
        self._holders: OrderedDict[int, _Holders] = OrderedDict()
        """Those of each chain, those that were used last at the end. What comes before a block counts as used after it,
        since without that the block is of no use."""
        self._gaps: dict[int, set[_Holding]] = {}
        """For each chain the blocks that are gone from caches that hold blocks after them."""
        self._num_stored = 0
        self._block_sizes: dict[int, int] = {}
        """Tokens per block of each replica from which events have come."""

    def __len__(self) -> int:
        """Blocks of caches that are known."""
        return len(self._held)

    def follows(self, replica: int) -> bool:
        """Whether events of this replica have come."""
        return replica in self._block_sizes

    def apply(self, replica: int, rank: int, events: Iterable[KVEvent]) -> None:
        """Note what has happened to the cache of one rank of a replica."""
        for event in events:
            if isinstance(event, BlockStored):
                self._store(replica, rank, event)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self._remove(_Block(replica, rank, event.group_idx or 0, name), event.medium)
            elif isinstance(event, AllBlocksCleared):
                self.forget(replica, rank)

    def forget(self, replica: int, rank: int | None = None) -> None:
        """Note that a rank of a replica, or all of them, may have lost everything."""
        gone = [block for block in self._held if block.replica == replica and rank in (None, block.rank)]
        for block in gone:
            self._drop(block)
        if rank is None:
            self._block_sizes.pop(replica, None)

    def cached_tokens(
        self, token_ids: Sequence[int], salt: str = "", adapter: str = "", most: int = sys.maxsize
    ) -> dict[int, int]:
        """Of the first `most` tokens of a prompt, how many each replica has from which events have come."""
        found: dict[int, int] = {}
        for size in set(self._block_sizes.values()):
            there = {replica for replica, its_size in self._block_sizes.items() if its_size == size}
            chain, chains = _root(adapter, salt), list[int]()
            blocks = _blocks(token_ids, size)
            while len(chains) * size < most and (
                piece := [chain := hash((chain, tokens)) for tokens in islice(blocks, _PIECE)]
            ):
                chains += piece
                if chain not in self._holders:
                    break
            del chains[most // size :]
            counts = self._count(chains, there)
            if self._gaps and any(self._is_gap(chain) for chain in chains[: max(counts.values())]):
                counts = self._count(chains, there, has_gaps=True)
            self._use(chains[: max(counts.values())])
            found |= {replica: count * size for replica, count in counts.items()}
        return found

    def _count(self, chains: list[int], replicas: set[int], *, has_gaps: bool = False) -> dict[int, int]:
        """How many of a prompt's blocks each replica has from the first on. `has_gaps`: one may hold a block without
        those before it."""
        counts: dict[int, int] = {}
        there, count = replicas, 0
        while there:

            def ends(chain: int, there: set[int] = there) -> bool:
                return not there <= self._replicas(chain)

            if has_gaps:
                count = next((place for place in range(count, len(chains)) if ends(chains[place])), len(chains))
            else:
                count = bisect_left(chains, True, count, key=ends)
            staying = there & self._replicas(chains[count]) if count < len(chains) else set[int]()
            counts |= dict.fromkeys(there - staying, count)
            there = staying
        return counts

    def _replicas(self, chain: int) -> frozenset[int]:
        holders = self._holders.get(chain)
        return frozenset() if holders is None else holders.replicas

    def _is_gap(self, chain: int) -> bool:
        """Whether a replica holds a block after this one, which it does not hold."""
        gone = self._gaps.get(chain)
        return gone is not None and not self._replicas(chain).issuperset(holding.replica for holding in gone)

    def _use(self, chains: list[int]) -> None:
        """Note that a prompt begins with these, unless that was noted lately."""
        if chains and self._num_stored - self._holders[chains[-1]].used > self._most // 8:
            for chain in reversed(chains):
                self._holders[chain].used = self._num_stored
                self._holders.move_to_end(chain)

    def _store(self, replica: int, rank: int, event: BlockStored) -> None:
        size, group, adapter = event.block_size, event.group_idx or 0, event.lora_name or ""
        if size < 1 or not event.block_hashes or len(event.token_ids) < size * len(event.block_hashes):
            return
        self._block_sizes[replica] = max(size, self._block_sizes.get(replica, 0))
        before = None
        if event.parent_block_hash is not None:
            before = self._held.get(_Block(replica, rank, group, event.parent_block_hash))
            if before is None:
                return  # what comes before it is not known, so no prompt leads here
        chain = _root(adapter, "") if before is None else before.chain
        extras = event.extra_keys or [None] * len(event.block_hashes)
        chains: list[int] = []
        for name, extra, tokens in zip(event.block_hashes, extras, _blocks(event.token_ids, size), strict=False):
            keys = [key for key in _keys(extra) if key != event.lora_name]
            chain = hash((_with_keys(chain, keys), tokens))
            before = self._add(_Block(replica, rank, group, name), chain, before, event.medium)
            chains.append(chain)
        for chain in reversed(chains):
            if chain in self._holders:  # else its name has come once more, for another chain
                self._holders.move_to_end(chain)
        while len(self._held) > self._most:
            for oldest in next(iter(self._holders.values())).blocks:
                self._drop(oldest)

    def _add(self, block: _Block, chain: int, parent: _Holding | None, medium: str | None) -> _Holding:
        holding = self._held.get(block)
        if holding is None or holding.chain != chain:
            if parent is not None:
                parent.num_children += 1
            if holding is not None:
                self._drop(block)  # it may be the parent
            holding = self._held[block] = _Holding(block.replica, chain, parent)
            self._num_stored += 1
            if chain in self._holders:
                self._holders[chain].change((*self._holders[chain].blocks, block))
            else:
                before = None if parent is None else self._holders.get(parent.chain)
                used = self._num_stored if before is None else before.used
                self._holders[chain] = _Holders((block,), _shared(frozenset({block.replica})), used)
        if medium not in holding.media:
            holding.media = (*holding.media, medium)
        return holding

    def _remove(self, block: _Block, medium: str | None) -> None:
        holding = self._held.get(block)
        if holding is not None:
            media = tuple(one for one in holding.media if one != medium)
            if media:
                holding.media = media
            else:
                self._drop(block)

    def _drop(self, block: _Block) -> None:
        holding = self._held.pop(block)
        chain, parent = holding.chain, holding.parent
        holding.media, holding.parent = (), None
        holders = self._holders[chain]
        if len(holders.blocks) > 1:
            holders.change(tuple(other for other in holders.blocks if other != block))
        else:
            del self._holders[chain]
        if holding.num_children:
            self._gaps.setdefault(chain, set()).add(holding)
        if parent is not None:
            parent.num_children -= 1
            if not parent.num_children and not parent.media:
                gone = self._gaps[parent.chain]
                gone.remove(parent)
                if not gone:
                    del self._gaps[parent.chain]


@functools.lru_cache(maxsize=4096)
def _shared(replicas: frozenset[int]) -> frozenset[int]:
    """An equal set, mostly the same object for all, which saves memory."""
    return replicas


def _root(adapter: str, salt: str) -> int:
    return _with_keys(hash(("root", adapter)), [salt] if salt else [])


def _with_keys(chain: int, keys: Sequence[Any]) -> int:
    """What is before a block, and on what the block depends beside its tokens."""
    return hash((chain, repr(keys))) if keys else chain


def _blocks(token_ids: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    return zip(*[iter(token_ids)] * min(size, len(token_ids) + 1), strict=False)


def _keys(extra: Any) -> Sequence[Any]:
    return extra if isinstance(extra, (list, tuple)) else ()
