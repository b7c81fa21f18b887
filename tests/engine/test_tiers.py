"""Blocks that are evicted, stored and fetched: against ranks that only know contents, and in a scheduler."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shardline.engine.block_pool import BlockPool
from shardline.engine.kv_cache import KVCache
from shardline.engine.prefixes import cache_namespace
from shardline.engine.scheduling.registry import RequestRegistry
from shardline.engine.scheduling.sequence import LiveSequence
from shardline.engine.tiers import BlockTraffic, content_key
from shardline.messages.copies import CopyResult
from shardline.messages.step import StepPlan
from shardline.models.kv_blocks import blocks_per_request
from shardline.models.kv_groups import KVGroup
from tests.engine.fake_worker import make_request
from tests.engine.harness import FULL, Engine, Shape
from tests.engine.lru_tier import CountingTier
from tests.engine.test_scheduler_exact import GROUPS, drive, growing_request, random_request

NUM_BLOCKS, NUM_SLOTS = 7, 3
KEYS = [content_key(bytes([number]), number % 2) for number in range(9)]


class TrafficMachine(RuleBasedStateMachine):
    """Ranks are tables of contents, which plans change in their order: copies first, then what is computed. Files never
    forget.

    Whoever finds a key in the pool must find its content in the block, once the ranks have run all plans.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.known = BlockPool(NUM_BLOCKS), set[bytes]()
        self.tier = CountingTier(NUM_SLOTS, self.known)
        self.traffic = BlockTraffic(self.pool, self.tier, 2)
        self.held: list[int] = []
        self.blocks: dict[int, object] = {}
        self.slots: dict[int, bytes] = {}
        self.files: set[bytes] = set()
        self.computed: dict[int, object] = {}
        """What the plan in the making computes."""
        self.in_flight: list[tuple[int, CopyResult]] = []
        self.tickets: set[int] = set()
        self.step_id = 0

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def compute(self) -> None:
        """A block gets content that nobody is to find."""
        block = self.pool.take_block()
        self.computed[block] = object()
        self.held.append(block)

    @precondition(lambda self: self.pool.num_free)
    @rule(key=st.sampled_from(KEYS))
    def publish(self, key: bytes) -> None:
        block = self.pool.take_block()
        self.computed[block] = key
        self.pool.publish_block(block, key)
        self.held.append(block)

    @precondition(lambda self: not set(self.held) <= set(self.computed))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A block is released once the plans that compute it are over."""
        block = data.draw(st.sampled_from([block for block in self.held if block not in self.computed]))
        self.held.remove(block)
        self.pool.release_block(block)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    def fetch(self, keys: list[bytes]) -> None:
        """A prefix of which the pool has some blocks, and the tier the others."""
        found = [block for key in keys if (block := self.pool.find_block(key)) is not None]
        absent = [key for key in keys if self.pool.find_block(key) is None]
        free = self.pool.num_free - sum(self.pool.num_references(block) == 0 for block in found)
        if absent and len(absent) <= free and all(map(self.traffic.can_fetch, absent)):
            ticket = self.traffic.fetch(found, dict.fromkeys(absent, 0))
            assert ticket not in self.tickets
            if ticket is None:
                assert len(self.tier.fetching) == NUM_SLOTS
            else:
                self.tickets.add(ticket)

    @rule(lost=st.sets(st.integers(0, NUM_SLOTS - 1)), late=st.sets(st.integers(0, NUM_SLOTS - 1)))
    def launch(self, lost: set[int], late: set[int]) -> None:
        """Plan what has gathered; ranks run it at once."""
        copies = self.traffic.take_copies(self.step_id)
        if copies is not None:
            for copy in copies.stores:
                assert self.blocks[copy.block] == copy.key
                self.slots[copy.slot] = copy.key
                self.files.add(copy.key)
            assert len(copies.fetches) <= 2
            for copy in copies.fetches:
                if self.slots.get(copy.slot) != copy.key:
                    assert copy.key in self.files
                    self.slots[copy.slot] = copy.key
                self.blocks[copy.block] = object() if copy.slot in lost | late else copy.key
            fetched = {copy.slot for copy in copies.fetches}
            self.in_flight.append((self.step_id, CopyResult(list(lost & fetched), list(late & fetched))))
        self.blocks |= self.computed
        self.computed.clear()
        self.step_id += 1

    @precondition(lambda self: self.in_flight)
    @rule()
    def finish(self) -> None:
        done = self.traffic.finish_plan(*self.in_flight.pop(0))
        assert len(set(done)) == len(done)
        assert set(done) <= self.tickets
        self.tickets -= set(done)

    @invariant()
    def content_is_that_of_the_key(self) -> None:
        if not self.computed and not self.traffic.has_copies:
            for key in KEYS:
                block = self.pool.find_block(key)
                assert block is None or self.blocks[block] == key
            settled = self.tier.slots.items() if not self.tier.fetching else ()
            assert all(self.slots[slot] == key for key, slot in settled)

    @invariant()
    def counts_agree(self) -> None:
        assert len(set(self.tier.slots.values())) == len(self.tier.slots) <= NUM_SLOTS
        assert self.traffic.is_fetching == bool(self.tickets)
        assert bool(self.tier.fetching) == bool(self.tickets)
        assert self.pool.num_free >= 0
        if not self.traffic.is_fetching:
            assert self.pool.num_used == len(set(self.held))

    def teardown(self) -> None:
        while self.tickets:
            self.launch(set(), set())
            while self.in_flight:
                self.finish()
        for block in self.held:
            self.pool.release_block(block)
        assert self.pool.num_used == 0


TestTraffic = TrafficMachine.TestCase
TestTraffic.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)

PROMPT = [1, 2, 3, 4, 1, 3, 2, 4, 1, 1, 2, 2, 4, 3, 3, 1, 2]
"""Four blocks and a token."""
SHAPE = Shape(num_blocks=13, max_model_len=40, max_num_batched_tokens=40, tier_slots=40)


def fill_pool(engine: Engine, name: str) -> None:
    """Evict what is cached."""
    engine.add(make_request(name, [4] * 36, 2, ignore_eos=True, cache_salt=name))
    engine.run()


def evicted(shape: Shape = SHAPE, loses: bool = False) -> Engine:
    """An engine that has computed the prompt, and evicted its blocks."""
    engine = Engine(shape, lambda: loses)
    engine.add(make_request("first", PROMPT, 2, ignore_eos=True))
    engine.run()
    fill_pool(engine, "x")
    fill_pool(engine, "y")
    return engine


def plans_of(engine: Engine, *names: str) -> list[StepPlan]:
    """The plans of requests with the prompt."""
    num_plans = len(engine.plans)
    engine.add(*[make_request(name, PROMPT, 2, ignore_eos=True) for name in names])
    engine.run()
    engine.check_done()
    return engine.plans[num_plans:]


def queries_and_hits(engine: Engine) -> tuple[int, int]:
    """Those of the last request; the three of `evicted` ask for 16, 32 and 32 tokens, and nothing is there yet."""
    traffic = engine.scheduler.kv.traffic
    assert traffic is not None
    return traffic.num_queries - 80, traffic.num_hits


def test_an_evicted_prefix_is_fetched_and_not_computed() -> None:
    engine = evicted()
    fetch, prefill, *_ = plans_of(engine, "again")
    assert not fetch.steps
    assert fetch.copies is not None
    assert len(fetch.copies.fetches) == 4
    (step,) = prefill.steps
    assert (step.start, step.num_tokens) == (16, 1)
    assert queries_and_hits(engine) == (16, 16)
    (step,) = plans_of(evicted(Shape(num_blocks=13, max_model_len=40)), "again")[0].steps
    assert (step.start, step.num_tokens) == (0, 17)


def test_requests_that_wait_for_the_same_blocks_fetch_them_once() -> None:
    engine = evicted()
    fetch, prefill, *_ = plans_of(engine, "again", "too")
    assert fetch.copies is not None
    assert len(fetch.copies.fetches) == 4
    assert [step.start for step in prefill.steps] == [16, 16]
    assert engine.tier is not None
    assert engine.tier.num_fetched == 4


def test_others_go_on_while_a_sequence_waits_for_blocks() -> None:
    engine = evicted()
    engine.add(make_request("other", [3, 3], 6, ignore_eos=True))
    engine.turn()
    fetch, *_ = plans_of(engine, "again")
    assert [step.num_tokens for step in fetch.steps] == [1]
    assert fetch.copies is not None


def test_lost_blocks_are_computed_again() -> None:
    engine = evicted(loses=True)
    fetch, prefill, *_ = plans_of(engine, "again")
    assert not fetch.steps
    (step,) = prefill.steps
    assert (step.start, step.num_tokens) == (0, 17)
    assert engine.tier is not None
    assert engine.tier.num_lost == 4
    assert queries_and_hits(engine) == (16, 0)


@pytest.mark.parametrize("most_fetches", [1, 9])
@pytest.mark.parametrize("submitted", [False, True])
def test_a_request_that_is_cancelled_while_blocks_are_fetched_gives_all_back(
    submitted: bool, most_fetches: int
) -> None:
    """Also those that no plan has fetched yet."""
    engine = evicted(replace(SHAPE, most_fetches=most_fetches))
    assert engine.tier is not None
    engine.add(make_request("again", PROMPT, 2))
    engine.submit()
    assert queries_and_hits(engine) == (16, 0), "nothing has come yet"
    pool, traffic = engine.scheduler.kv.pool, engine.scheduler.kv.traffic
    assert traffic is not None
    assert (pool.num_used, len(engine.tier.fetching), traffic.is_fetching) == (4, 4, True)
    if not submitted:
        engine.add(make_request("too", PROMPT, 2))
    engine.scheduler.abort_requests(["again", "too"])
    assert engine.scheduler.registry.num_live == 0
    assert pool.num_used == 4, "ranks still write them"
    engine.run()
    engine.check_done({"again", "too"})
    assert (pool.num_used, len(engine.tier.fetching), traffic.is_fetching) == (0, 0, False)
    assert engine.tier.num_fetched == 4


def test_what_was_longest_unused_is_dropped() -> None:
    """Seven slots: the four blocks of the prompt are stored first, and are the first to go unless they are fetched."""
    kept, dropped = evicted(), evicted(Shape(num_blocks=13, max_model_len=40, tier_slots=7))
    fill_pool(dropped, "z")
    for engine, hits in ((kept, 16), (dropped, 0)):
        engine.add(make_request("again", PROMPT, 2))
        engine.run()
        assert engine.outputs["again"][-1].num_cached_tokens == hits


def test_keys_are_those_of_the_namespace() -> None:
    tier, ours, theirs = CountingTier(9), cache_namespace("weights", b"ours"), cache_namespace("weights", b"theirs")
    cache, sequence = cache_and_sequence(ours, tier)
    cache.grow_tables(sequence, 17)
    sequence.num_scheduled = 17
    cache.publish_blocks(sequence)
    cache.free_blocks(sequence)
    for _ in range(8):
        cache.pool.take_block(0)
    assert tier.num_stored == 4
    for namespace, absent in ((ours, 4), (theirs, 0), (None, 0)):
        cache, sequence = cache_and_sequence(namespace, tier)
        assert len(cache.lookup_prefix(sequence).absent) == absent
    cache, sequence = cache_and_sequence(ours, tier)
    assert cache.fetch_prefix(sequence, cache.lookup_prefix(sequence)) is not None
    assert not cache.lookup_prefix(sequence).absent, "it would wait again"
    sequence.forget_computed()
    assert len(cache.lookup_prefix(sequence).absent) == 4


def cache_and_sequence(namespace: bytes | None, tier: CountingTier) -> tuple[KVCache, LiveSequence]:
    cache = KVCache(FULL, 9, 4, prefix_caching=True, namespace=namespace)
    cache.add_tier(tier, 9)
    sequence = RequestRegistry(cache, max_model_len=40).add_request(make_request("r", PROMPT))
    assert sequence is not None
    return cache, sequence


def test_what_the_pool_has_of_a_prefix_stays_there_while_the_rest_is_fetched() -> None:
    """Two of the prompt's blocks are evicted. The other two are the least recently used of the pool."""
    engine = Engine(SHAPE)
    engine.add(make_request("first", PROMPT, 2, ignore_eos=True))
    engine.run()
    fill_pool(engine, "x")
    fetch, prefill, *_ = plans_of(engine, "again")
    assert fetch.copies is not None
    assert (len(fetch.copies.fetches), len(fetch.copies.stores)) == (2, 1)
    assert [step.start for step in prefill.steps] == [16]


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("groups", GROUPS)
def test_tiny_pools_with_tiers_that_lose_blocks(groups: tuple[KVGroup, ...], pipeline: bool) -> None:
    fetched = lost = preemptions = 0
    for seed in range(12):
        rng = random.Random(seed)
        shape = Shape(
            groups,
            num_blocks=3 + blocks_per_request(groups, 39, 4, 1),
            max_model_len=40,
            max_in_flight=rng.choice([1, 2, 4]),
            pipeline=pipeline,
            max_num_batched_tokens=16,
            tier_slots=rng.choice([2, 30]),
            tier_files=rng.random() < 0.5,
            most_fetches=rng.choice([1, 3, 9]),
        )
        request = growing_request if seed % 3 == 0 else random_request
        engine = drive(shape, rng, 16, 0.05, request, loss_rate=0.2)
        assert engine.tier is not None
        fetched, lost = fetched + engine.tier.num_fetched, lost + engine.tier.num_lost
        preemptions += engine.scheduler.stats().num_preemptions
    assert fetched > 0
    assert lost > 0
    assert preemptions > 0
