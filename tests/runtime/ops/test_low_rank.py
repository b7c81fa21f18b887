"""What adapters add to a linear: against plain torch, and the same bits for a row in any batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from shardline.kernels.low_rank import LowRankWeights
from shardline.runtime.ops.adapters.low_rank import expert_low_rank, low_rank, low_rank_reference
from tests.runtime.ops.helpers import KERNELS, assert_close, assert_same_bits, randn, sorted_slots

SLOTS, MAX_RANK, WIDTHS = 4, 20, (70, 33, 5)


def adapters(in_features: int, dtype: torch.dtype, rng: torch.Generator) -> LowRankWeights:
    """Three adapters of unlike ranks, which leave some parts alone, and an empty slot. Unused memory is NaN. The first
    part of the first one and the last part of the second one have factors."""
    weights = KERNELS.low_rank_empty(SLOTS, MAX_RANK, in_features, WIDTHS, dtype)
    for unused in (weights.down, weights.up, weights.factors):
        unused.fill_(math.nan)
    for slot, ranks in enumerate([(16, 1, 20), (3, 0, 17), (0, 8, 0)]):
        for part, (rank, width) in enumerate(zip(ranks, WIDTHS, strict=True)):
            factors = randn(width, rng=rng) if (slot, part) in ((0, 0), (1, 2)) else None
            if rank:
                down, up = randn(rank, in_features, rng=rng), randn(width, rank, rng=rng)
                weights.put(slot, part, down, up, 0.3 + slot, factors)
    return weights


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("in_features", [1, 7, 64, 301])
@pytest.mark.parametrize("has_bias", [False, True])
def test_against_torch(dtype, rng, in_features, has_bias):
    weights = adapters(in_features, dtype, rng)
    x = randn(23, in_features + 5, dtype=dtype, rng=rng)[:, 2 : in_features + 2]
    slots = torch.randint(-1, SLOTS, (23,), generator=rng, dtype=torch.int32)
    bias = randn(sum(WIDTHS), dtype=dtype, rng=rng) if has_bias else None
    both = low_rank(KERNELS, x, slots, weights, bias, scaled=True)
    expected = low_rank_reference(x, slots, weights, bias, scaled=True)
    assert_close(both, expected, scale=4 * math.sqrt(in_features))
    assert torch.equal(both[:, 1], expected[:, 1])
    weights.scaled.zero_()
    out = low_rank(KERNELS, x, slots, weights, bias)
    assert_close(out, low_rank_reference(x, slots, weights, bias), scale=4 * math.sqrt(in_features))
    assert_same_bits(out, low_rank(KERNELS, x, slots, weights, bias, scaled=True)[:, 0])
    without = out[slots == 3]  # the empty slot
    assert len(without)
    assert_same_bits(without, (torch.full((sum(WIDTHS),), -0.0) if bias is None else bias.float()).expand_as(without))


@pytest.mark.usefixtures("isa")
def test_a_row_has_the_same_bits_in_every_batch(dtype, rng):
    weights = adapters(90, dtype, rng)
    row, others = randn(1, 90, dtype=dtype, rng=rng), randn(257, 90, dtype=dtype, rng=rng)
    bias = randn(sum(WIDTHS), dtype=dtype, rng=rng)

    def alone(slot: int) -> Tensor:
        return low_rank(KERNELS, row, torch.tensor([slot], dtype=torch.int32), weights, bias, scaled=True)[0]

    for slot, size in itertools.product((-1, 0, 1, 2), (1, 2, 3, 4, 5, 9, 64, 257)):
        place = size // 2
        x = others[:size].clone()
        x[place] = row[0]
        for mix in (torch.full((size,), slot), torch.randint(-1, SLOTS, (size,), generator=rng)):
            slots = mix.to(torch.int32)
            slots[place] = slot
            assert_same_bits(low_rank(KERNELS, x, slots, weights, bias, scaled=True)[place], alone(slot))


def test_columns_have_the_same_bits_on_every_rank(dtype, rng):
    """A rank has some of the outputs of each part."""
    whole = KERNELS.low_rank_empty(1, 16, 48, (90, 40), dtype)
    downs = [randn(11, 48, rng=rng) for _ in range(2)]
    ups = [randn(width, 11, rng=rng) for width in (90, 40)]
    for part in range(2):
        whole.put(0, part, downs[part], ups[part], 0.7)
    x, slots = randn(6, 48, dtype=dtype, rng=rng), torch.zeros(6, dtype=torch.int32)
    expected = low_rank(KERNELS, x, slots, whole)
    for first, second in ((slice(0, 31), slice(0, 8)), (slice(31, 90), slice(8, 40))):
        own = KERNELS.low_rank_empty(1, 16, 48, (len(ups[0][first]), len(ups[1][second])), dtype)
        own.put(0, 0, downs[0], ups[0][first], 0.7)
        own.put(0, 1, downs[1], ups[1][second], 0.7)
        columns = torch.cat([expected[:, :90][:, first], expected[:, 90:][:, second]], dim=1)
        assert_same_bits(low_rank(KERNELS, x, slots, own), columns)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize(("first", "scaled", "has_bias"), [(0, False, True), (1, True, True), (1, False, False)])
def test_rows_of_experts_are_those_of_linears(dtype, rng, num_tokens, first, scaled, has_bias):
    """Two adapters, each with weights for two experts: a row has the weights of its token's adapter and its expert."""
    weights, num_experts, all_experts = adapters(50, dtype, rng), 2, 4
    ids = torch.stack([torch.randperm(all_experts, generator=rng)[:2] for _ in range(num_tokens)]).int()
    chosen = torch.randint(-1, SLOTS // num_experts, (num_tokens,), generator=rng, dtype=torch.int32)
    bias = randn(num_experts, sum(WIDTHS), dtype=dtype, rng=rng) if has_bias else None
    x = randn(num_tokens, 50, dtype=dtype, rng=rng)
    tokens, experts = sorted_slots(ids, first, num_experts)
    slots = torch.where(chosen[tokens] < 0, -1, chosen[tokens] * num_experts + experts).int()
    rows, held = x[tokens], x[tokens.unique()]
    if not len(rows):
        rows = held = x[:0]
    for given, form in ((x, {}), (held, {"compact": True}), (rows, {"sorted": True})):
        out = expert_low_rank(
            KERNELS, given, ids, chosen, weights, num_experts, bias, first_expert=first, scaled=scaled, **form
        )
        assert out.shape == (num_tokens * 2, 1 + scaled, sum(WIDTHS))
        for row, expert in enumerate(experts.tolist()):
            own = None if bias is None else bias[expert]
            alone = low_rank(KERNELS, rows[row : row + 1], slots[row : row + 1], weights, own, scaled=scaled)
            assert_same_bits(out[row].flatten(), alone.flatten())


def test_wrong_rows_of_experts_are_refused(rng):
    weights, x = adapters(10, torch.float32, rng), torch.zeros(2, 10)
    ids = torch.tensor([[0, 1], [1, 0], [1, 0]], dtype=torch.int32)
    none = torch.full((3,), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match="x has too few rows"):
        expert_low_rank(KERNELS, x, ids, none, weights, 2)
    with pytest.raises(ValueError, match="adapters have a slot for each expert"):
        expert_low_rank(KERNELS, x, ids, none, weights, 3)
    with pytest.raises(ValueError, match="an adapter that does not exist"):
        expert_low_rank(KERNELS, x[:1], ids[:1], none[:1] + 3, weights, 2)


def test_slots_are_used_again(dtype, rng):
    weights = adapters(30, dtype, rng)
    x, slots = randn(3, 30, dtype=dtype, rng=rng), torch.zeros(3, dtype=torch.int32)
    weights.clear(0)
    assert (low_rank(KERNELS, x, slots, weights) == 0).all()
    weights.put(0, 1, randn(2, 30, rng=rng), randn(33, 2, rng=rng), 1.0)
    out = low_rank(KERNELS, x, slots, weights)
    assert_close(out, low_rank_reference(x, slots, weights), scale=20.0)
    assert (out[:, :70] == 0).all()
    with pytest.raises(ValueError, match="an adapter that does not exist"):
        low_rank(KERNELS, x, torch.full((3,), SLOTS, dtype=torch.int32), weights)
