"""Grouped products: against the oracle, and bit by bit against one linear per token and expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardline import _cpu
from shardline.kernels.contract import Kernels
from shardline.runtime.ops.activation import gated_activation
from shardline.runtime.ops.moe.exchange import (
    combine_slots,
    count_exchanged,
    expert_slots,
    pack_dispatch,
    place_slots,
    place_slots_reference,
    ranks_of_experts,
)
from shardline.runtime.ops.moe.experts import (
    expert_down,
    expert_down_reference,
    expert_up,
    expert_up_reference,
    slot_products_reference,
)
from shardline.weights.base import PackedExperts, weight_format
from tests.runtime.ops.helpers import KERNELS, assert_close, assert_same_bits, randn, sorted_slots

FORMATS = ["plain", "int8", "int4_fast"]


def choose(num_tokens: int, num_experts: int, k: int, rng: torch.Generator) -> Tensor:
    scores = torch.rand(num_tokens, num_experts, generator=rng)
    return scores.topk(k)[1].to(torch.int32)


def packed(weights: Tensor, name: str = "plain", kernels: Kernels = KERNELS) -> PackedExperts:
    """weights: [E, out, in]; `name`: of a format."""
    stack = weight_format(name).allocate_experts(kernels, len(weights), weights[0])
    for index, weight in enumerate(weights):
        weight_format(name).pack_expert(kernels, stack, index, weight)
    return stack


# Few tokens for each expert, many for each, one expert only, no tokens at all.
SHAPES = [(1, 4, 2), (3, 8, 3), (40, 5, 2), (150, 3, 2), (90, 1, 1), (0, 4, 2)]


@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), SHAPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.usefixtures("isa")
def test_up_matches_reference(dtype, rng, num_tokens, num_experts, k, gated):
    x = randn(num_tokens, 77, dtype=dtype, rng=rng)
    weights = randn(num_experts, 2 * 70 if gated else 70, 77, dtype=dtype, rng=rng) * 77**-0.5
    ids = choose(num_tokens, num_experts, k, rng)
    bias = randn(num_experts, len(weights[0]), dtype=dtype, rng=rng) if k > 1 else None
    rows = expert_up(KERNELS, x, ids, packed(weights), "silu", gated=gated, bias=bias)
    expected = expert_up_reference(x, ids, weights, "silu", gated=gated, bias=bias)
    assert rows.shape == (num_tokens * k, 70)
    if num_tokens:
        # Gate and up are rounded before the activation, so an ulp there may become two.
        torch.testing.assert_close(rows, expected, atol=2e-5 if dtype == torch.float32 else 2e-2, rtol=2e-2)


@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), SHAPES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.usefixtures("isa")
def test_down_matches_reference(dtype, rng, num_tokens, num_experts, k, shared):
    ids = choose(num_tokens, num_experts, k, rng)
    x = randn(num_tokens * k, 77, dtype=dtype, rng=rng)
    weights = randn(num_experts, 130, 77, dtype=dtype, rng=rng) * 77**-0.5
    slot_weights = torch.rand(num_tokens, k, generator=rng)
    extra: dict[str, Any] = {}
    if shared:
        extra = {
            "shared": randn(num_tokens, 130, dtype=dtype, rng=rng),
            "shared_scale": torch.rand(num_tokens, generator=rng),
            "bias": randn(num_experts, 130, dtype=dtype, rng=rng),
        }
    actual = expert_down(KERNELS, x, ids, slot_weights, packed(weights), **extra)
    expected = expert_down_reference(x, ids, slot_weights, weights, **extra)
    if num_tokens:
        assert_close(actual, expected, scale=1.0)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.usefixtures("isa")
def test_rows_have_the_bits_of_one_linear(dtype, rng, name):
    """A token's row is that of a linear of its expert alone, however many others are in the batch."""
    num_tokens, num_experts, k, depth, width = 130, 4, 2, 96, 70
    weights = randn(num_experts, 2 * width, depth, dtype=dtype, rng=rng)
    stack = packed(weights, name)
    x, ids = randn(num_tokens, depth, dtype=dtype, rng=rng), choose(num_tokens, num_experts, k, rng)
    ids[:100, 0], ids[:100, 1] = 2, 1  # one expert with many rows beside some with few
    bias = randn(num_experts, 2 * width, dtype=dtype, rng=rng)
    whole = expert_up(KERNELS, x, ids, stack, "silu", gated=True, bias=bias)
    begin = 0
    for expert in range(num_experts):
        tokens = (ids == expert).any(1).nonzero()[:, 0]
        linear = weight_format(name).pack_linear(KERNELS, weights[expert])
        for row, token in enumerate(tokens.tolist()):
            alone = gated_activation(KERNELS, linear(x[token : token + 1], bias[expert]), "silu")
            assert_same_bits(whole[begin + row], alone[0])
        begin += len(tokens)
    assert begin == num_tokens * k


@pytest.mark.parametrize("name", [*FORMATS, "fp8"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.usefixtures("isa")
def test_rows_may_have_biases_of_their_own(dtype, rng, name, scaled):
    """Perhaps with factors: rows have the bits of a linear with the same biases."""
    num_tokens, num_experts, k, depth, width = 70, 3, 2, 48, 70
    weights = randn(num_experts, 2 * width, depth, dtype=dtype, rng=rng)
    stack, linears = packed(weights, name), [weight_format(name).pack_linear(KERNELS, weight) for weight in weights]
    x, ids = randn(num_tokens, depth, dtype=dtype, rng=rng), choose(num_tokens, num_experts, k, rng)
    ids[:60, 0], ids[:60, 1] = 2, 1  # one expert with many rows
    tokens, experts = sorted_slots(ids, 0, num_experts)
    biases = randn(num_tokens * k, 1 + scaled, 2 * width, rng=rng)
    up = expert_up(KERNELS, x, ids, stack, "silu", gated=True, bias=biases)
    given = torch.index_select(x, 0, tokens)
    down = expert_slots(KERNELS, given, ids, stack, bias=biases)
    for row, (token, expert) in enumerate(zip(tokens.tolist(), experts.tolist(), strict=True)):
        bias = biases[row : row + 1] if scaled else biases[row]
        alone = linears[expert](x[token : token + 1], bias)
        assert_same_bits(up[row], gated_activation(KERNELS, alone, "silu")[0])
        assert_same_bits(down[token * k + ids[token].tolist().index(expert)], alone[0])
    for call in (
        lambda few: expert_up(KERNELS, x, ids, stack, "silu", gated=True, bias=few),
        lambda few: expert_slots(KERNELS, given, ids, stack, bias=few),
    ):
        with pytest.raises(ValueError, match="bias has 139 rows, the routing needs 140"):
            call(biases[:-1])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_token_does_not_depend_on_the_batch(dtype, rng, name, num_threads):
    num_tokens, num_experts, k, hidden, inner = 257, 6, 3, 100, 48
    up = packed(randn(num_experts, 2 * inner, hidden, dtype=dtype, rng=rng), name)
    down = packed(randn(num_experts, hidden, inner, dtype=dtype, rng=rng), name)
    x, ids = randn(num_tokens, hidden, dtype=dtype, rng=rng), choose(num_tokens, num_experts, k, rng)
    slot_weights = torch.rand(num_tokens, k, generator=rng)

    def forward(part: slice) -> Tensor:
        inner_rows = expert_up(KERNELS, x[part], ids[part], up, "silu", gated=True)
        return expert_down(KERNELS, inner_rows, ids[part], slot_weights[part], down)

    whole = forward(slice(None))
    _cpu.set_num_threads(num_threads)
    try:
        for m in [1, 2, 3, 17, 60, 200, 257]:
            assert_same_bits(forward(slice(m)), whole[:m])
        assert_same_bits(forward(slice(77, 78)), whole[77:78])
    finally:
        _cpu.set_num_threads(1)


def test_all_tokens_may_choose_one_expert(dtype, rng):
    weights = randn(4, 2 * 40, 64, dtype=dtype, rng=rng)
    x = randn(300, 64, dtype=dtype, rng=rng)
    ids = torch.full((300, 1), 3, dtype=torch.int32)
    rows = expert_up(KERNELS, x, ids, packed(weights), "silu", gated=True)
    assert_same_bits(
        rows, gated_activation(KERNELS, weight_format("plain").pack_linear(KERNELS, weights[3])(x), "silu")
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("num_tokens", [1, 4, 61])
def test_whole_experts_on_ranks_have_the_bits_of_one_rank(dtype, rng, num_ranks, num_tokens):
    """What goes from rank to rank here by slicing is what `all_to_all_rows` carries."""
    num_experts, k, hidden, inner = 7, 3, 48, 40
    up, down = randn(num_experts, 2 * inner, hidden, dtype=dtype, rng=rng), randn(num_experts, hidden, inner, rng=rng)
    down = down.to(dtype)
    x, ids = randn(num_tokens, hidden, dtype=dtype, rng=rng), choose(num_tokens, num_experts, k, rng)
    slot_weights = torch.rand(num_tokens, k, generator=rng)
    expected = expert_down(
        KERNELS, expert_up(KERNELS, x, ids, packed(up), "silu", gated=True), ids, slot_weights, packed(down)
    )
    experts = [num_experts * rank // num_ranks for rank in range(num_ranks + 1)]
    tokens = [num_tokens * rank // num_ranks for rank in range(num_ranks + 1)]
    token_bounds, expert_bounds = torch.tensor(tokens), torch.tensor(experts)
    counts = count_exchanged(KERNELS, ids, token_bounds.tolist(), expert_bounds)
    ranks = ranks_of_experts(ids, expert_bounds)
    own = [slice(tokens[rank], tokens[rank + 1]) for rank in range(num_ranks)]

    def parts(sent: list[Tensor], table: Tensor, to: int) -> Tensor:
        received = []
        for rank, rows in enumerate(sent):
            start = int(table[rank, :to].sum())
            received.append(rows[start : start + int(table[rank, to])])
        return torch.cat(received)

    sent = [pack_dispatch(KERNELS, x[part], ids[part], expert_bounds) for part in own]
    slots = []
    for rank in range(num_ranks):
        arrived = parts(sent, counts.tokens, rank)
        assert_same_bits(arrived, x[(ranks == rank).any(1)])
        first, held = experts[rank], slice(experts[rank], experts[rank + 1])
        rows = expert_up(KERNELS, arrived, ids, packed(up[held]), "silu", gated=True, first_expert=first, compact=True)
        slots.append(expert_slots(KERNELS, rows, ids, packed(down[held]), first_expert=first))
        products = slot_products_reference(rows, ids, down[held], first)[ranks == rank]
        if len(products):
            assert_close(slots[-1][: len(products)], products, scale=float(inner))
    for rank, part in enumerate(own):
        back = parts(slots, counts.slots, rank)
        assert len(back) == ids[part].numel()
        combined = combine_slots(KERNELS, back, ids[part], slot_weights[part], expert_bounds)
        assert_same_bits(combined, expected[part])


def test_checks_shapes(rng):
    stack = packed(randn(2, 40, 16, rng=rng))
    ids = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    with pytest.raises(ValueError, match="x has 1 rows, the routing needs 2"):
        expert_up(KERNELS, torch.zeros(1, 16), ids, stack, "silu", gated=True)
    with pytest.raises(ValueError, match="panels has shape"):
        expert_up(KERNELS, torch.zeros(2, 17), ids, stack, "silu", gated=True)
    with pytest.raises(ValueError, match="token_bounds must rise"):
        count_exchanged(KERNELS, ids, [0, 1], torch.tensor([0, 2]))


@pytest.mark.parametrize("redundant", [0, 5])
def test_tokens_take_the_copies_of_an_expert_in_turn(rng, redundant):
    num_experts = 7
    held = torch.cat(
        [torch.randperm(num_experts, generator=rng), torch.randint(num_experts, (redundant,), generator=rng)]
    )
    copies = held.bincount(minlength=num_experts).to(torch.int32)
    places = torch.zeros(num_experts, 1 + redundant, dtype=torch.int32)
    for expert in range(num_experts):
        where = (held == expert).nonzero().flatten().to(torch.int32)
        places[expert, : len(where)] = where
    for num_tokens in (0, 1, 61):
        ids = choose(num_tokens, num_experts, 3, rng)
        found = place_slots(KERNELS, ids, places, copies, 9)
        assert found.equal(place_slots_reference(ids, places, copies, 9))
        assert held[found.long()].equal(ids.long())
