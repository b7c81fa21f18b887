"""Which beginnings of prompts the caches of replicas hold, by the events that they publish."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shardline.messages.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent

ENTRY_BYTES = 640
"""About what one block of one cache takes here."""


class _Block(NamedTuple):
    """A block as its cache names it."""

    replica: int
    rank: int
    group: int
    name: BlockHash


class _Holders(NamedTuple):
    """Where the same tokens are, after the same ones."""

    blocks: tuple[_Block, ...]
    replicas: frozenset[int]


class _Holding(NamedTuple):
    chain: int
    """What the block and all before it hold, under a name that is the same for all caches."""
    media: tuple[str | None, ...]


_NOWHERE = _Holders((), frozenset())
_NOTHING = repr(())
"""What a block depends on that depends on its tokens only."""


class KVIndex:
    """The blocks of all caches; those that were neither stored nor asked for lately are forgotten.

    Caches name blocks each in its own way, so tokens are hashed again here. Of several KV groups, a block counts if one
    has it.
    """

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        """`max_bytes`: about as much memory is used."""
        self._most = max(1, max_bytes // ENTRY_BYTES)
        self._held: dict[_Block, _Holding] = {}
        self._holders: OrderedDict[int, _Holders] = OrderedDict()
        """Those of each chain, the chain that was used last at the end."""
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

    def cached_tokens(self, token_ids: Sequence[int], salt: str = "", adapter: str = "") -> dict[int, int]:
        """Leading tokens of a prompt that each replica has, of those from which events have come."""
        found: dict[int, int] = {}
        for size in set(self._block_sizes.values()):
            there = {replica for replica, its_size in self._block_sizes.items() if its_size == size}
            chain, extra = _root(adapter), repr((salt,)) if salt else _NOTHING
            for start in range(0, len(token_ids) - size + 1, size):
                chain = hash((chain, extra, *token_ids[start : start + size]))
                extra = _NOTHING
                holders = self._holders.get(chain, _NOWHERE).replicas
                if not there <= holders:
                    found |= dict.fromkeys(there - holders, start)
                    there &= holders
                if not there:
                    break
                self._holders.move_to_end(chain)
            found |= dict.fromkeys(there, len(token_ids) // size * size)
        return found

    def _store(self, replica: int, rank: int, event: BlockStored) -> None:
        size, group, adapter = event.block_size, event.group_idx or 0, event.lora_name or ""
        if size < 1 or len(event.token_ids) < size * len(event.block_hashes):
            return
        self._block_sizes[replica] = max(size, self._block_sizes.get(replica, 0))
        chain: int | None = _root(adapter)
        if event.parent_block_hash is not None:
            before = self._held.get(_Block(replica, rank, group, event.parent_block_hash))
            chain = None if before is None else before.chain
        if chain is None:
            return  # what comes before it is not known, so no prompt leads here
        extras = event.extra_keys or [None] * len(event.block_hashes)
        for index, (name, extra) in enumerate(zip(event.block_hashes, extras, strict=False)):
            others = tuple(key for key in _keys(extra) if key != event.lora_name)
            chain = hash((chain, repr(others), *event.token_ids[index * size : (index + 1) * size]))
            self._add(_Block(replica, rank, group, name), chain, event.medium)

    def _add(self, block: _Block, chain: int, medium: str | None) -> None:
        known = self._held.get(block)
        if known is not None and known.chain != chain:
            self._drop(block)
            known = None
        media = () if known is None else known.media
        if medium not in media:
            self._held[block] = _Holding(chain, (*media, medium))
        if known is None:
            self._note_holders(chain, (*self._holders.get(chain, _NOWHERE).blocks, block))
        self._holders.move_to_end(chain)
        while len(self._held) > self._most:
            for oldest in next(iter(self._holders.values())).blocks:
                self._drop(oldest)

    def _remove(self, block: _Block, medium: str | None) -> None:
        known = self._held.get(block)
        if known is None:
            return
        media = tuple(one for one in known.media if one != medium)
        if media and media != known.media:
            self._held[block] = known._replace(media=media)
        elif not media:
            self._drop(block)

    def _drop(self, block: _Block) -> None:
        chain = self._held.pop(block).chain
        others = tuple(other for other in self._holders[chain].blocks if other != block)
        if others:
            self._note_holders(chain, others)
        else:
            del self._holders[chain]

    def _note_holders(self, chain: int, blocks: tuple[_Block, ...]) -> None:
        replicas = frozenset(block.replica for block in blocks)
        self._holders[chain] = _Holders(blocks, _shared(replicas))


@functools.lru_cache(maxsize=4096)
def _shared(replicas: frozenset[int]) -> frozenset[int]:
    """An equal set, mostly the same object for all, which saves memory."""
    return replicas


def _root(adapter: str) -> int:
    return hash(("root", adapter))


def _keys(extra: Any) -> Sequence[Any]:
    return extra if isinstance(extra, (list, tuple)) else ()
