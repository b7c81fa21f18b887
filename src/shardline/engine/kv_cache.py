"""The block tables of all sequences, whose blocks are of one pool, and the prefixes that they share."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from shardline.engine.block_pool import NULL_BLOCK, BlockPool
from shardline.engine.context_pool import ContextPool
from shardline.engine.kv_events import KVEventLog
from shardline.engine.prefixes import BlockHasher, longest_hit, num_window_blocks
from shardline.engine.scheduling.sequence import KVState, LiveSequence
from shardline.engine.tiers import BlockTraffic, Tier, content_key
from shardline.models.kv_blocks import SPLIT_TOKENS, blocks_per_request
from shardline.models.kv_groups import KVGroup


@dataclass(frozen=True)
class PrefixHit:
    """The cached blocks with which a sequence can start; valid until the pool changes."""

    tables: list[list[int]]
    """The block table of each group, with NULL_BLOCK before a window, and where a block must be fetched."""
    num_tokens: int
    num_blocks: int
    """Blocks in the tables that are not null."""
    num_free: int
    """How many of these blocks nobody holds."""
    absent: dict[bytes, int]
    """The keys of what must be fetched from the tier before a sequence can start with this, and the rank of each."""
    pool_tokens: int
    """Tokens that could be skipped with what the pool has."""


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
        context: int = 1,
    ) -> None:
        """`namespace`: 16 to 64 bytes, see `prefixes.cache_namespace`; None: one of this cache alone. `context`: ranks
        that share the keys of a request."""
        is_shared = context > 1
        of_split = SPLIT_TOKENS // block_size
        self.pool = ContextPool(num_blocks, context, of_split) if is_shared else BlockPool(num_blocks)
        self.traffic: BlockTraffic | None = None
        """What moves blocks to the second tier and back; None: there is none."""
        self.events: KVEventLog | None = None
        self._groups = groups
        self.block_size = block_size
        self.num_groups = len(groups)
        self._hasher = BlockHasher(block_size, namespace or secrets.token_bytes(32)) if prefix_caching else None
        self._suffixes = [content_key(b"", index) for index in range(len(groups))]
        self._windows = [(index, group.window) for index, group in enumerate(groups) if group.window is not None]
        self.no_blocks: list[list[int]] = [[] for _ in groups]
        """What a step that needs no further blocks carries; do not change it."""

    def add_tier(self, tier: Tier, most_fetches: int) -> None:
        """Keep the content of evicted blocks in a tier, and find prefixes there. Call it before anything is cached.
        `most_fetches`: see `BlockTraffic`."""
        self.traffic = BlockTraffic(self.pool, tier, most_fetches)

    @property
    def is_fetching(self) -> bool:
        """Whether blocks are held for prefixes that are on their way from the tier."""
        return self.traffic is not None and self.traffic.is_fetching

    def log_events(self) -> KVEventLog:
        """Note in a log what is published and what is lost. Call it after `add_tier`."""
        self.events = KVEventLog(self.pool)
        return self.events

    def reset_prefixes(self) -> None:
        """Let later sequences find nothing that is published now. It stays until its blocks are handed out again.

        The next namespace follows from this one, so engines that share content and are all reset share it again.
        """
        if self._hasher is not None:
            self._hasher = self._hasher.successor()
            if self.events is not None:
                self.events.note_cleared()

    def new_state(self) -> KVState:
        """The state of a sequence that holds nothing."""
        return KVState([[] for _ in self._groups], [0] * len(self._groups))

    def lookup_prefix(self, sequence: LiveSequence) -> PrefixHit:
        """The longest cached prefix of the sequence's tokens that leaves at least one token to compute.

        Positions whose logits are wanted are computed too, even if they are cached. A sequence that has waited for a
        fetch starts with what the pool has, so that it need not wait again.
        """
        if self._hasher is None:
            return PrefixHit(self.no_blocks, 0, 0, 0, {}, 0)
        most = self._most_hits(sequence)
        hashes, find, suffixes = sequence.kv.hashes, self.pool.find_block, self._suffixes
        traffic = self.traffic if sequence.fetched is None else None
        self._hasher.extend(hashes, sequence.request.cache_salt, sequence.tokens, most)

        def in_pool(group: int, block: int) -> bool:
            return find(hashes[block] + suffixes[group]) is not None

        def in_pool_or_tier(group: int, block: int) -> bool:
            assert traffic is not None
            return in_pool(group, block) or traffic.can_fetch(hashes[block] + suffixes[group])

        cached = in_pool if traffic is None else in_pool_or_tier
        length = longest_hit(self._groups, self.block_size, most, cached)
        tables: list[list[int]] = []
        held: list[int] = []
        absent: dict[bytes, int] = {}
        for group, suffix in zip(self._groups, suffixes, strict=True):
            needed = length if group.window is None else num_window_blocks(group.window, self.block_size)
            first = max(0, length - needed)
            blocks = [find(content + suffix) or NULL_BLOCK for content in hashes[first:length]]
            tables.append([NULL_BLOCK] * first + blocks)
            if NULL_BLOCK in blocks:
                places = [place for place, block in enumerate(blocks, first) if block == NULL_BLOCK]
                absent |= {hashes[place] + suffix: self._rank_at(place) for place in places}
                blocks = [block for block in blocks if block != NULL_BLOCK]
            held += blocks
        num_free = self.pool.most([block for block in held if self.pool.num_references(block) == 0])
        in_pool_length = longest_hit(self._groups, self.block_size, most, in_pool) if absent else length
        pool_tokens = in_pool_length * self.block_size
        return PrefixHit(tables, length * self.block_size, self.pool.fewest(held), num_free, absent, pool_tokens)

    def _rank_at(self, place: int) -> int:
        return place * self.block_size // SPLIT_TOKENS % self.pool.num_ranks

    def _most_hits(self, sequence: LiveSequence) -> int:
        """The most blocks of a sequence that may be skipped."""
        wanted = None if sequence.report is None else sequence.report.first_missing
        return (len(sequence.tokens) - 1 if wanted is None else wanted) // self.block_size

    def fetch_prefix(self, sequence: LiveSequence, hit: PrefixHit) -> int | None:
        """Fetch what is absent from a hit; returns the ticket of `BlockTraffic.fetch`."""
        assert self.traffic is not None
        sequence.fetched = hit.pool_tokens, hit.num_tokens
        self.traffic.num_queries += self._most_hits(sequence) * self.block_size - hit.pool_tokens
        return self.traffic.fetch(_blocks_of(hit.tables), hit.absent)

    def blocks_of_request(self, num_tokens: int, step_tokens: int) -> int:
        """The most blocks that `num_tokens` of a sequence need at a time, if a step computes up to `step_tokens`."""
        return blocks_per_request(self._groups, num_tokens, self.block_size, step_tokens, self.pool.num_ranks)

    def blocks_ahead(self, sequence: LiveSequence, step_tokens: int) -> int:
        """The most blocks that the known tokens of a sequence need beside those that it holds."""
        held = self.pool.fewest(_blocks_of(sequence.kv.tables))
        return max(0, self.blocks_of_request(len(sequence.tokens), step_tokens) - held)

    def share_prefix(self, sequence: LiveSequence, hit: PrefixHit) -> None:
        """Give a sequence that holds nothing the blocks of a hit from which none is absent."""
        kv = sequence.kv
        if self.traffic is not None:
            if sequence.fetched is None:
                self.traffic.num_queries += self._most_hits(sequence) * self.block_size - hit.num_tokens
            else:  # what has come; ranks may have lost some of it
                start, end = sequence.fetched
                self.traffic.num_hits += max(0, min(hit.num_tokens, end) - start)
        for group, table in enumerate(hit.tables):
            kv.tables[group] = list(table)
            kv.num_slid[group] = table.count(NULL_BLOCK)
            for block in table[kv.num_slid[group] :]:
                self.pool.share_block(block)
        kv.num_published = hit.num_tokens // self.block_size
        kv.num_sent = 0

    def reach(self, sequence: LiveSequence) -> int:
        """The largest `num_tokens` that `grow_tables` can be called with now."""
        return self.pool.reach(len(sequence.kv.tables[0]), len(self._groups)) * self.block_size

    def grow_tables(self, sequence: LiveSequence, num_tokens: int) -> list[list[int]]:
        """Give the sequence blocks for its first `num_tokens` tokens.

        Returns the entries of each group's table that no plan has carried yet, for the next plan; do not change them.
        """
        kv = sequence.kv
        length = -(-num_tokens // self.block_size)
        if length <= kv.num_sent:
            return self.no_blocks
        for table in kv.tables:
            while len(table) < length:
                table.append(self.pool.take_block(len(table)))
        unsent = [table[kv.num_sent :] for table in kv.tables]
        kv.num_sent = length
        return unsent

    def publish_blocks(self, sequence: LiveSequence) -> None:
        """Publish the full blocks whose tokens are scheduled and known."""
        kv = sequence.kv
        full = min(sequence.num_scheduled, len(sequence.tokens)) // self.block_size
        if full <= kv.num_published or self._hasher is None:
            return
        self._hasher.extend(kv.hashes, sequence.request.cache_salt, sequence.tokens, full)
        for group, (table, suffix) in enumerate(zip(kv.tables, self._suffixes, strict=True)):
            for block in range(kv.num_published, full):
                if table[block] != NULL_BLOCK:
                    self.pool.publish_block(table[block], kv.hashes[block] + suffix)
            first = max(kv.num_published, kv.num_slid[group])
            if self.events is not None and first < full:
                tokens = sequence.tokens[first * self.block_size : full * self.block_size]
                salt = sequence.request.cache_salt
                self.events.note_stored(kv.hashes[:full], first, group, tokens, self.block_size, salt)
        kv.num_published = full

    def slide_windows(self, sequence: LiveSequence) -> None:
        """Take back the blocks that lie before their group's window for all plans in flight and all later ones."""
        kv = sequence.kv
        for group, window in self._windows:
            first = (sequence.num_computed - window + 1) // self.block_size
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


def _blocks_of(tables: Sequence[Sequence[int]]) -> list[int]:
    """The blocks of tables of equal length, in the order of their positions."""
    return [block for blocks in zip(*tables, strict=True) for block in blocks if block != NULL_BLOCK]
