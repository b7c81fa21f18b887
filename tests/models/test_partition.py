"""Who owns what: every share is covered once, evenly, and stages are as balanced as any split could be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.models.kv_blocks import blocks_per_request, longest_request
from shardline.models.kv_groups import kv_groups
from shardline.models.partition import Span, balance_stages, parse_stages, split_dim, split_heads
from shardline.models.sharding import check_tensor_parallel
from shardline.models.spec import DecoderSpec
from tests.models.specs import decoder_specs


@settings(deadline=None)
@given(size=st.integers(0, 500), parts=st.integers(1, 20), unit=st.integers(1, 33))
def test_split_dim_covers_evenly_on_unit_bounds(size: int, parts: int, unit: int) -> None:
    spans = split_dim(size, parts, unit)
    assert len(spans) == parts
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(size))
    assert all(bound % unit == 0 or bound == size for span in spans for bound in (span.start, span.stop))
    num_units = [-(-span.size // unit) for span in spans]
    assert max(num_units) - min(num_units) <= 1


@settings(deadline=None)
@given(num_kv_heads=st.integers(1, 12), group=st.integers(1, 12), parts=st.integers(1, 40))
def test_split_heads_gives_each_query_head_to_one_rank_with_its_kv_head(
    num_kv_heads: int, group: int, parts: int
) -> None:
    num_heads = num_kv_heads * group
    try:
        shares = split_heads(num_heads, num_kv_heads, parts)
    except ValueError:
        assert parts > num_kv_heads
        assert -(-parts // num_kv_heads) > group
        return
    assert len(shares) == parts
    assert [h for share in shares for h in range(share.heads.start, share.heads.stop)] == list(range(num_heads))
    for share in shares:
        assert share.heads.size > 0
        needed = {head // group for head in range(share.heads.start, share.heads.stop)}
        assert needed == set(range(share.kv_heads.start, share.kv_heads.stop))
    if parts <= num_kv_heads:
        assert sum(share.kv_heads.size for share in shares) == num_kv_heads
    else:
        assert all(share.kv_heads.size == 1 for share in shares)


@settings(deadline=None)
@given(
    costs=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    num_stages=st.integers(1, 5),
    first=st.integers(0, 30),
    last=st.integers(0, 30),
    drawn=st.frozensets(st.integers(1, 8), max_size=4),
)
def test_balance_stages_is_as_good_as_brute_force(
    costs: list[int], num_stages: int, first: int, last: int, drawn: frozenset[int]
) -> None:
    joined = frozenset(start for start in drawn if start < len(costs))
    starts = [start for start in range(1, len(costs)) if start not in joined]
    if len(starts) + 1 < num_stages:
        with pytest.raises(ValueError, match=f"use {len(starts) + 1} or fewer"):
            balance_stages(costs, num_stages, first, last, joined)
        return

    def worst(bounds: tuple[int, ...]) -> int:
        sums = [sum(costs[start:stop]) for start, stop in itertools.pairwise(bounds)]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    spans = balance_stages(costs, num_stages, first, last, joined)
    assert all(span.size > 0 for span in spans)
    bounds = (0, *(span.stop for span in spans))
    assert [span.start for span in spans] == list(bounds[:-1])
    assert bounds[-1] == len(costs)
    assert not joined & set(bounds[:-1])
    cuts = itertools.combinations(starts, num_stages - 1)
    assert worst(bounds) == min(worst((0, *inner, len(costs))) for inner in cuts)


def test_stages_by_hand() -> None:
    assert parse_stages("1, 3,2", 6, 3) == (Span(0, 1), Span(1, 4), Span(4, 6))
    for text, message in (("1,x", "layer counts like"), ("3,3", "must be 3 positive"), ("0,3,3", "add up to")):
        with pytest.raises(ValueError, match=message):
            parse_stages(text, 6, 3)
    with pytest.raises(ValueError, match="no stage may begin in layers 2 to 4"):
        parse_stages("1,2,3", 6, 3, frozenset({2, 3, 4}))


@settings(deadline=None)
@given(spec=decoder_specs(), size=st.integers(1, 24))
def test_refused_tensor_parallel_sizes_name_sizes_that_work(spec: DecoderSpec, size: int) -> None:
    try:
        check_tensor_parallel(spec, size)
    except ValueError as error:
        suggested = str(error).rpartition("; use ")[2].split(" or ")
        assert suggested
        for number in suggested:
            check_tensor_parallel(spec, int(number))
    else:
        for layer in spec.layers:
            assert all(heads.size for heads in layer.attention.split_heads(size))
        assert all(span.size for span in split_dim(spec.hidden_size, size))


@settings(deadline=None)
@given(
    spec=decoder_specs(),
    num_blocks=st.integers(0, 60),
    block_size=st.integers(1, 20),
    max_step_tokens=st.integers(1, 50),
    most=st.integers(0, 2000),
)
def test_the_longest_request_is_the_longest_that_fits(
    spec: DecoderSpec, num_blocks: int, block_size: int, max_step_tokens: int, most: int
) -> None:
    groups = kv_groups(spec)
    longest = longest_request(groups, num_blocks, block_size, max_step_tokens, most)
    assert longest <= most
    if longest:
        assert blocks_per_request(groups, longest, block_size, max_step_tokens) <= num_blocks
    if longest < most:
        assert blocks_per_request(groups, longest + 1, block_size, max_step_tokens) > num_blocks


@settings(deadline=None)
@given(spec=decoder_specs(max_layers=14))
def test_kv_groups_hold_every_layer_once_and_spread_over_the_model(spec: DecoderSpec) -> None:
    groups = kv_groups(spec)
    assert sorted(index for group in groups for index in group.layers) == list(range(len(spec.layers)))
    windows = [layer.attention.window for layer in spec.layers]
    rarest = min(windows.count(window) for window in windows)
    for group in groups:
        assert {windows[index] for index in group.layers} == {group.window}
        assert len(group.layers) <= rarest
    for window in set(windows):
        alike = [group.layers for group in groups if group.window == window]
        for cut in range(len(windows)):
            counts = [sum(index < cut for index in layers) for layers in alike]
            assert max(counts) - min(counts) <= 1
