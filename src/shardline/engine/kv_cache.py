"""The pool of KV blocks, and the block tables of all sequences, which share it."""

from __future__ import annotations

import functools
import secrets
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from shardline.engine.scheduling.sequence import KVState, LiveSequence
from shardline.models.kv_groups import KVGroup, blocks_per_request

_DIGEST_BYTES = 16


def cache_namespace(weights: str, secret: bytes) -> bytes:
    """What the keys of cached prefixes begin with: equal for engines with the same weights and secret.

    `weights`: a name of everything that keys and values depend on, such as a fingerprint. `secret`: of a deployment.
    """
    return blake2b(weights.encode(), key=secret, digest_size=32).digest()


class BlockHasher:
    """Chained hashes of full token blocks: equal hashes mean equal namespace, salt, position and tokens so far.

    The chains start from the namespace, which depends on a secret, so that nobody can compute a collision or the chain
    of a salt in advance.
    """

    def __init__(self, block_size: int, namespace: bytes) -> None:
        self._block_size = block_size
        self._namespace = namespace

    def extend(self, hashes: list[bytes], salt: str, token_ids: Sequence[int], num_blocks: int) -> None:
        """Extend `hashes`, those of the first blocks of `token_ids`, to `num_blocks` blocks."""
        if len(hashes) >= num_blocks:
            return
        if hashes:
            parent = hashes[-1]
        else:
            root = salt.encode("utf-8", "surrogatepass")
            parent = blake2b(root, digest_size=_DIGEST_BYTES, key=self._namespace).digest()
        size = self._block_size
        for start in range(len(hashes) * size, num_blocks * size, size):
            tokens = array("q", token_ids[start : start + size]).tobytes()
            parent = blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest()
            hashes.append(parent)


def num_window_blocks(window: int, block_size: int) -> int:
    """Full blocks before a block boundary that the token at the boundary attends to with this window."""
    return -(-(window - 1) // block_size)


def longest_hit(groups: Sequence[KVGroup], block_size: int, num_blocks: int, cached: Callable[[int, int], bool]) -> int:
    """The largest number of blocks, at most `num_blocks`, that a sequence can skip.

    `cached(group, block)` tells whether a block of the sequence is cached. Full attention needs every skipped block. A
    windowed group needs only the blocks to which the first token after them attends.
    """
    length = num_blocks
    for index, group in enumerate(groups):
        if group.window is None:
            length = next((block for block in range(length) if not cached(index, block)), length)
    # A shorter length moves the windows of all groups, so repeat until the length does not change.
    while True:
        before = length
        for index, group in enumerate(groups):
            if group.window is not None:
                length = _window_hit(index, num_window_blocks(group.window, block_size), length, cached)
        if length == before:
            return length


def _window_hit(group: int, needed: int, length: int, cached: Callable[[int, int], bool]) -> int:
    """The largest length whose last `needed` blocks (all of them, if there are fewer) are cached in `group`."""
    if needed == 0:
        return length
    for block in range(length - 1, -1, -1):
        if not cached(group, block):
            length = block
        elif length - block >= needed:
            return length
    return length


NULL_BLOCK = 0
"""Fills places of block tables that are never read; it is never handed out."""


class BlockPool:
    """Reference-counted blocks 1 .. num_blocks - 1, every operation O(1) on average.

    A block that nobody holds is free. A free block keeps its published content until it is handed out again, and can
    be shared until then. Blocks without content are handed out first, then the least recently released ones.

    A block takes little memory, because simulations have pools of thousands of replicas.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"the KV cache needs at least 2 blocks (one is reserved), got {num_blocks}")
        self.num_usable = num_blocks - 1
        self._references = array("I", bytes(4 * num_blocks))
        self._contents: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._numbers = _block_numbers(num_blocks)
        self._num_touched = 1
        """Blocks from this one on were never handed out."""
        self._blank: list[int] = []
        """Other free blocks without content."""
        self._num_cached = 0
        """Free blocks with content."""
        self._released: deque[int] = deque()
        """Blocks with content, in the order of their release. Only the last entry of a free block counts."""
        self._num_entries = array("I", bytes(4 * num_blocks))
        """For each block its entries in `_released`."""

    @property
    def num_free(self) -> int:
        """Blocks that `take_block` can hand out, with cached content or without."""
        return len(self._blank) + self._num_cached + len(self._contents) - self._num_touched

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_usable - self.num_free

    def num_references(self, block: int) -> int:
        """How many holders the block has."""
        return self._references[block]

    def take_block(self) -> int:
        """Hand out a block without content, with the caller as its only holder. There must be a free one."""
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
        block = self._released.popleft()
        self._num_entries[block] -= 1
        while self._num_entries[block] or self._references[block]:
            block = self._released.popleft()
            self._num_entries[block] -= 1
        self._num_cached -= 1
        content = self._contents[block]
        assert content is not None
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
                self._released.append(block)
                self._num_entries[block] += 1
                self._num_cached += 1
                if len(self._released) > 2 * len(self._contents):
                    self._drop_old_entries()

    def _drop_old_entries(self) -> None:
        """Keep only the entries of `_released` that count."""
        entries, references = self._num_entries, self._references
        kept = []
        for block in self._released:
            entries[block] -= 1
            if not entries[block] and not references[block]:
                kept.append(block)
        for block in kept:
            entries[block] = 1
        self._released = deque(kept)

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


@dataclass(frozen=True)
class PrefixHit:
    """The cached blocks with which a sequence can start; valid until the pool changes."""

    tables: list[list[int]]
    """The block table of each group, with NULL_BLOCK before a window."""
    num_tokens: int
    num_blocks: int
    """Blocks in the tables that are not null."""
    num_free: int
    """How many of these blocks nobody holds."""


class KVCache:
    """Gives sequences their blocks and takes them back, in all KV groups at once. Nothing else writes the pool.

    Workers run plans in the order in which they were scheduled, and store all tokens of a step before any token attends
    to them. So plan n and later ones may read a block that plan n writes. Content is published as soon as its tokens
    are known and a plan completes it, so requests that arrive together compute a common prefix only once. If a
    scheduled plan is not run, the scheduler and its cache cannot be used any more. Published blocks are full and are
    never written again.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool,
        namespace: bytes | None = None,
    ) -> None:
        """`namespace`: 16 to 64 bytes, see `cache_namespace`; None: one of this cache alone."""
        self.pool = BlockPool(num_blocks)
        self._groups = groups
        self._block_size = block_size
        self.num_groups = len(groups)
        self._hasher = BlockHasher(block_size, namespace or secrets.token_bytes(32)) if prefix_caching else None
        self._suffixes = [index.to_bytes(2, "little") for index in range(len(groups))]
        self._windows = [(index, group.window) for index, group in enumerate(groups) if group.window is not None]
        self.no_blocks: list[list[int]] = [[] for _ in groups]
        """What a step that needs no further blocks carries; do not change it."""

    def new_state(self) -> KVState:
        """The state of a sequence that holds nothing."""
        return KVState([[] for _ in self._groups], [0] * len(self._groups))

    def lookup_prefix(self, sequence: LiveSequence) -> PrefixHit:
        """The longest cached prefix of the sequence's tokens that leaves at least one token to compute.

        Positions whose logits are wanted are computed too, even if they are cached.
        """
        if self._hasher is None:
            return PrefixHit(self.no_blocks, 0, 0, 0)
        unscored = sequence.first_unscored
        most = (len(sequence.tokens) - 1 if unscored is None else unscored) // self._block_size
        hashes, find, suffixes = sequence.kv.hashes, self.pool.find_block, self._suffixes
        self._hasher.extend(hashes, sequence.request.cache_salt, sequence.tokens, most)
        length = longest_hit(
            self._groups,
            self._block_size,
            most,
            lambda group, block: find(hashes[block] + suffixes[group]) is not None,
        )
        tables, held = [], []
        for group, suffix in zip(self._groups, suffixes, strict=True):
            needed = length if group.window is None else num_window_blocks(group.window, self._block_size)
            first = max(0, length - needed)
            blocks = [find(content + suffix) for content in hashes[first:length]]
            known = [block for block in blocks if block is not None]
            assert len(known) == length - first
            tables.append([NULL_BLOCK] * first + known)
            held += known
        num_free = sum(self.pool.num_references(block) == 0 for block in held)
        return PrefixHit(tables, length * self._block_size, len(held), num_free)

    def blocks_of_request(self, num_tokens: int, step_tokens: int) -> int:
        """The most blocks that `num_tokens` of a sequence need at a time, if a step computes up to `step_tokens`."""
        return blocks_per_request(self._groups, num_tokens, self._block_size, step_tokens)

    def share_prefix(self, sequence: LiveSequence, hit: PrefixHit) -> None:
        """Give a sequence that holds nothing the blocks of a hit."""
        kv = sequence.kv
        for group, table in enumerate(hit.tables):
            kv.tables[group] = list(table)
            kv.num_slid[group] = table.count(NULL_BLOCK)
            for block in table[kv.num_slid[group] :]:
                self.pool.share_block(block)
        kv.num_published = hit.num_tokens // self._block_size
        kv.num_sent = 0

    def reach(self, sequence: LiveSequence) -> int:
        """The largest `num_tokens` that `grow_tables` can be called with now."""
        return (len(sequence.kv.tables[0]) + self.pool.num_free // len(self._groups)) * self._block_size

    def grow_tables(self, sequence: LiveSequence, num_tokens: int) -> list[list[int]]:
        """Give the sequence blocks for its first `num_tokens` tokens.

        Returns the entries of each group's table that no plan has carried yet, for the next plan; do not change them.
        """
        kv = sequence.kv
        length = -(-num_tokens // self._block_size)
        if length <= kv.num_sent:
            return self.no_blocks
        for table in kv.tables:
            while len(table) < length:
                table.append(self.pool.take_block())
        unsent = [table[kv.num_sent :] for table in kv.tables]
        kv.num_sent = length
        return unsent

    def publish_blocks(self, sequence: LiveSequence) -> None:
        """Publish the full blocks whose tokens are scheduled and known."""
        kv = sequence.kv
        full = min(sequence.num_scheduled, len(sequence.tokens)) // self._block_size
        if full <= kv.num_published or self._hasher is None:
            return
        self._hasher.extend(kv.hashes, sequence.request.cache_salt, sequence.tokens, full)
        for table, suffix in zip(kv.tables, self._suffixes, strict=True):
            for block in range(kv.num_published, full):
                if table[block] != NULL_BLOCK:
                    self.pool.publish_block(table[block], kv.hashes[block] + suffix)
        kv.num_published = full

    def slide_windows(self, sequence: LiveSequence) -> None:
        """Take back the blocks that lie before their group's window for all plans in flight and all later ones."""
        kv = sequence.kv
        for group, window in self._windows:
            first = (sequence.num_computed - window + 1) // self._block_size
            for block in range(kv.num_slid[group], first):
                self.pool.release_block(kv.tables[group][block])
                kv.tables[group][block] = NULL_BLOCK
            kv.num_slid[group] = max(first, kv.num_slid[group])

    def free_blocks(self, sequence: LiveSequence) -> None:
        """Take back every block; the last ones are re-used first. No plan in flight may use them."""
        kv = sequence.kv
        for blocks in zip(*(reversed(table) for table in kv.tables), strict=True):
            for block in blocks:
                if block != NULL_BLOCK:
                    self.pool.release_block(block)
        for group, table in enumerate(kv.tables):
            table.clear()
            kv.num_slid[group] = 0

    def recompute_cost(self, sequence: LiveSequence) -> int:
        """Tokens to compute again if the sequence loses its blocks: all but those in blocks that others hold too.

        This takes O(log(number of blocks)), since shared blocks always form a prefix.
        """
        table, first = sequence.kv.tables[0], sequence.kv.num_slid[0]
        shared = bisect_left(table, True, lo=first, key=lambda block: self.pool.num_references(block) == 1)
        return sequence.num_scheduled - (shared * self._block_size if shared > first else 0)
