"""Sequences whose blocks are of several ranks: each block is of the rank that has its split; nothing else changes."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardline.engine import kv_cache
from shardline.engine.block_pool import NULL_BLOCK
from shardline.engine.context_pool import ContextPool
from shardline.models import kv_blocks
from shardline.models.kv_blocks import blocks_per_request
from shardline.models.kv_groups import KVGroup
from tests.engine.harness import Engine, Shape
from tests.engine.test_scheduler_exact import GROUPS, drive, growing_request, random_request, shapes


def check_ranks(engine: Engine, of_split: int) -> None:
    """Every block that a plan hands out is of the rank that has its split."""
    lengths: dict[int, int] = defaultdict(int)
    for plan in engine.plans:
        for start in plan.starts:
            lengths[start.seq_id] = 0
        for step in plan.steps:
            for table in step.new_blocks:
                for place, block in enumerate(table, lengths[step.seq_id]):
                    if block != NULL_BLOCK:
                        assert block % engine.shape.context == place // of_split % engine.shape.context
                        assert block >= engine.shape.context, "the first block of each rank is never handed out"
            lengths[step.seq_id] += len(step.new_blocks[0])
        if plan.copies is not None:
            for copy in (*plan.copies.stores, *plan.copies.fetches):
                assert copy.block % engine.shape.context == copy.slot % engine.shape.context


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(shapes(), st.integers(2, 4), st.integers(1, 3), st.integers(1, 6), st.integers(0, 2**32), st.booleans())
def test_any_schedule_gives_the_reference_and_every_block_its_rank(
    shape: Shape, context: int, of_split: int, spare: int, seed: int, growing: bool
) -> None:
    split = of_split * shape.block_size
    with patch.object(kv_blocks, "SPLIT_TOKENS", split), patch.object(kv_cache, "SPLIT_TOKENS", split):
        needed = blocks_per_request(shape.groups, shape.max_model_len, shape.block_size, 1, context)
        num_blocks = needed + spare * context
        slots = shape.tier_slots * context
        shape = dataclasses.replace(shape, context=context, num_blocks=num_blocks, tier_slots=slots)
        engine = drive(shape, random.Random(seed), 8, 0.05, growing_request if growing else random_request)
    check_ranks(engine, of_split)


@pytest.mark.parametrize("groups", GROUPS)
def test_sequences_are_preempted_if_one_rank_is_full(groups: tuple[KVGroup, ...]) -> None:
    preemptions = 0
    with patch.object(kv_blocks, "SPLIT_TOKENS", 8), patch.object(kv_cache, "SPLIT_TOKENS", 8):
        for seed in range(4):
            num_blocks = 4 + blocks_per_request(groups, 39, 4, 1, 2)
            shape = Shape(groups, num_blocks, max_model_len=40, max_num_batched_tokens=16, context=2)
            engine = drive(shape, random.Random(seed), 12, 0.02, growing_request)
            preemptions += engine.scheduler.stats().num_preemptions
            check_ranks(engine, 2)
    assert preemptions > 0


@given(st.integers(1, 400), st.integers(0, 50), st.sampled_from([16, 32, 64]), st.integers(1, 5))
def test_the_fullest_rank_counts(num_blocks: int, first: int, block_size: int, ranks: int) -> None:
    """However a run of blocks lies to the splits, no rank has more of them than is counted."""
    of_split = 512 // block_size
    held = Counter((first + block) // of_split % ranks for block in range(num_blocks))
    counted = blocks_per_request((KVGroup((0,), None),), num_blocks * block_size, block_size, 1, ranks)
    assert max(held.values()) * ranks <= counted
    from_start = Counter(block // of_split % ranks for block in range(num_blocks))
    assert max(from_start.values()) * ranks == counted


def test_a_table_reaches_as_far_as_each_rank_has_blocks() -> None:
    pool = ContextPool(2 * 5, 2, 2)  # four blocks of each rank
    assert (pool.num_usable, pool.num_free, pool.reach(0, 1), pool.reach(0, 2)) == (8, 8, 8, 4)
    taken = [pool.take_block(0), pool.take_block(1), pool.take_block(4)]
    assert [block % 2 for block in taken] == [0, 0, 0]
    assert (pool.num_free, pool.num_used) == (2, 3)
    assert pool.reach(0, 1) == 1, "the first rank has one more block"
    assert pool.reach(2, 1) == 5, "two of the other rank, and one of the first"
    assert (pool.fewest(taken), pool.most(taken)) == (0, 6)
    pool.publish_block(taken[2], b"content")
    evicted: list[tuple[bytes, int]] = []
    pool.on_evict = lambda content, block: evicted.append((content, block))
    for block in taken:
        pool.release_block(block)
    assert pool.find_block(b"content") == taken[2]
    for _ in range(4):
        pool.take_block(0)
    assert evicted == [(b"content", taken[2])]
    assert pool.find_block(b"content") is None
