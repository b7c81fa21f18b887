"""Grouped products and routing: against the oracles, and bit by bit against one linear per token and expert."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from shardline.kernels.cuda.triton.experts import sort_slots
from shardline.models.feed_forward import Routing
from shardline.runtime.ops.moe import exchange, experts
from shardline.runtime.ops.moe.experts import expert_down_reference, slot_products_reference
from shardline.runtime.ops.moe.routing import route_experts_reference
from shardline.weights.base import PackedExperts
from tests.kernels.cuda.helpers import KERNELS
from tests.runtime.ops.helpers import assert_close, assert_same_bits, randn
from tests.runtime.ops.moe.test_experts import choose
from tests.runtime.ops.moe.test_routing import ROUTINGS


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, **extra: Tensor | None
) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(logits), routing.experts_per_token), -7, dtype=torch.int32)
    weights = torch.full(ids.shape, torch.nan)
    given = msgspec.structs.asdict(routing)
    KERNELS.route_experts(
        logits,
        bias,
        ids,
        weights,
        extra.get("shared_scale"),
        extra.get("counts"),
        given["scoring"] == "sigmoid",
        given["normalized"],
        given["scale"],
        given["num_experts"],
        given["num_groups"],
        given["top_groups"],
        given["group_score"] == "top2_sum",
        extra.get("slots"),
    )
    return ids, weights


@pytest.mark.parametrize("routing", ROUTINGS, ids=[f"{r.num_experts}-{r.scoring}" for r in ROUTINGS])
@pytest.mark.parametrize("biased", [False, True])
def test_routing_matches_reference(rng, routing, biased):
    logits = randn(20, routing.num_experts, rng=rng) * 2
    bias = randn(routing.num_experts, rng=rng) * 0.1 if biased else None
    ids, weights = route(logits, routing, bias)
    expected_ids, expected_weights = route_experts_reference(logits.double(), routing, bias)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights.float(), atol=1e-7, rtol=2e-6)


def test_ties_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [0.0] * 5])
    ids, weights = route(logits, Routing(5, 2))
    assert ids.tolist() == [[1, 2], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert route(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), Routing(4, 1, num_groups=2))[0].tolist() == [[1]]


def test_padding_chooses_nothing_and_counts_nowhere(rng):
    routing, logits, slots = Routing(9, 3), randn(6, 10, rng=rng), torch.tensor([5, -1, 0, 7, -1, -1])
    counts, scale = torch.arange(9), torch.full((6,), torch.nan)
    ids, weights = route(logits, routing, slots=slots, counts=counts, shared_scale=scale)
    expected_ids, expected_weights = route(logits, routing)
    assert torch.equal(ids[slots >= 0], expected_ids[slots >= 0])
    assert torch.equal(ids[slots < 0], torch.full((3, 3), -1, dtype=torch.int32))
    assert_same_bits(weights, expected_weights)
    chosen = torch.bincount(ids[slots >= 0].flatten().long(), minlength=9)
    assert torch.equal(counts, torch.arange(9) + chosen)
    torch.testing.assert_close(scale, logits[:, 9].sigmoid(), atol=1e-7, rtol=2e-6)


def test_ids_stay_in_range_whatever_the_logits():
    values = [float("nan"), float("inf"), -float("inf"), 0.0]
    logits = torch.cartesian_prod(*[torch.tensor(values)] * 3)
    for routing in (Routing(3, 2), Routing(3, 1, num_groups=3), Routing(3, 2, scoring="sigmoid")):
        ids, _ = route(logits, routing)
        assert ((ids >= 0) & (ids < 3)).all()
        assert all(len(set(row)) == routing.experts_per_token for row in ids.tolist())


@pytest.mark.parametrize(("num_tokens", "num_experts", "first", "count"), [(1, 4, 0, 4), (30, 5, 1, 3), (90, 2, 0, 2)])
def test_slots_are_sorted_by_expert(rng, num_tokens, num_experts, first, count):
    ids = choose(num_tokens, num_experts, 2, rng)
    ids[num_tokens // 2] = -1  # padding
    by_expert = sort_slots(ids, first, count, 16)
    found: dict[int, list[int]] = {expert: [] for expert in range(count)}
    for expert, slots in zip(by_expert.experts.tolist(), by_expert.slots.tolist(), strict=True):
        if expert >= 0:
            found[expert] += [slot for slot in slots if slot >= 0]
    for expert, slots in found.items():
        assert slots == (ids.flatten() == first + expert).nonzero()[:, 0].tolist()


def up(x: Tensor, ids: Tensor, weights: Tensor, first: int = 0) -> Tensor:
    out = torch.full((ids.numel(), weights.shape[1] // 2), torch.nan)
    KERNELS.expert_up(x, ids, first, False, weights, None, "silu", True, out)
    return out


def down(x: Tensor, ids: Tensor, slot_weights: Tensor, weights: Tensor, first: int = 0, **shared: Tensor) -> Tensor:
    out = torch.full((ids.shape[0], weights.shape[1]), torch.nan)
    extra = (shared.get("shared"), shared.get("shared_scale"))
    KERNELS.expert_down(x, ids, slot_weights, first, weights, None, *extra, out)
    return out


def test_rows_have_the_bits_of_one_linear(rng):
    """A slot's row is that of a linear of its expert alone, however many others are in the batch."""
    num_tokens, num_experts, width, depth = 90, 3, 20, 40
    weights = randn(num_experts, 2 * width, depth, rng=rng)
    x, ids = randn(num_tokens, depth, rng=rng), choose(num_tokens, num_experts, 2, rng)
    ids[:70, 0], ids[:70, 1] = 2, 1  # more rows than a tile has, beside few
    rows = up(x, ids, weights)
    for expert in range(num_experts):
        product, alone = torch.empty(num_tokens, 2 * width), torch.empty(num_tokens, width)
        KERNELS.linear(x, weights[expert], None, product)
        KERNELS.activation(product, alone, "silu", True)
        chosen = ids == expert
        assert_same_bits(rows[chosen.flatten()], alone[chosen.nonzero()[:, 0]])


@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(1, 4, 2), (3, 8, 3), (40, 3, 1), (0, 4, 2)])
@pytest.mark.parametrize("shared", [False, True])
def test_down_matches_reference(rng, num_tokens, num_experts, k, shared):
    ids, depth, columns = choose(num_tokens, num_experts, k, rng), 36, 70
    x, slot_weights = randn(num_tokens * k, depth, rng=rng), torch.rand(num_tokens, k, generator=rng)
    weights = randn(num_experts, columns, depth, rng=rng) * depth**-0.5
    extra: dict[str, Any] = {}
    if shared:
        extra = {"shared": randn(num_tokens, columns, rng=rng), "shared_scale": torch.rand(num_tokens, generator=rng)}
    actual = down(x, ids, slot_weights, weights, **extra)
    by_expert = torch.cat([x[(ids.flatten() == expert)] for expert in range(num_experts)])
    if num_tokens:
        assert_close(actual, expert_down_reference(by_expert, ids, slot_weights, weights, **extra), scale=1.0)


def test_a_rank_computes_its_own_experts_only(rng):
    ids, depth = choose(9, 5, 3, rng), 36
    x, slot_weights = randn(27, depth, rng=rng), torch.rand(9, 3, generator=rng)
    weights = randn(5, 40, depth, rng=rng)
    parts = [down(x, ids, slot_weights, weights[a:b], first=a) for a, b in ((0, 2), (2, 5))]
    by_expert = torch.cat([x[(ids.flatten() == expert)] for expert in range(5)])
    products = slot_products_reference(by_expert, ids, weights) * slot_weights[..., None]
    assert_close(parts[0], (products * (ids < 2)[..., None]).sum(1), scale=depth**0.5)
    assert_close(parts[0] + parts[1], products.sum(1), scale=depth**0.5)


def test_a_token_does_not_depend_on_the_batch(rng):
    weights = randn(4, 2 * 24, 40, rng=rng), randn(4, 40, 24, rng=rng)
    x, ids, slot_weights = randn(80, 40, rng=rng), choose(80, 4, 2, rng), torch.rand(80, 2, generator=rng)

    def forward(part: slice) -> Tensor:
        return down(up(x[part], ids[part], weights[0]), ids[part], slot_weights[part], weights[1])

    whole = forward(slice(None))
    for part in (slice(0, 1), slice(3, 60), slice(79, 80)):
        assert_same_bits(forward(part), whole[part])


@pytest.mark.parametrize(("num_ranks", "num_tokens"), [(1, 4), (2, 1), (3, 20), (5, 9)])
def test_whole_experts_on_ranks_have_the_bits_of_one_rank(rng, num_ranks, num_tokens):
    """What goes from rank to rank here by slicing is what `all_to_all_rows` carries."""
    num_experts, k, hidden, inner = 7, 3, 24, 20
    up, down = randn(num_experts, 2 * inner, hidden, rng=rng), randn(num_experts, hidden, inner, rng=rng)
    x, shared = randn(num_tokens, hidden, rng=rng), randn(num_tokens, hidden, rng=rng)
    ids = torch.rand(num_tokens, num_experts, generator=rng).topk(k)[1].int()
    slot_weights = torch.rand(num_tokens, k, generator=rng)

    def held(weights: torch.Tensor) -> PackedExperts:
        return PackedExperts(weights, None, weights.shape[2], weights.shape[1])

    inner_rows = experts.expert_up(KERNELS, x, ids, held(up), "silu", gated=True)
    expected = experts.expert_down(KERNELS, inner_rows, ids, slot_weights, held(down), shared=shared)
    bounds = torch.tensor([num_experts * rank // num_ranks for rank in range(num_ranks + 1)])
    tokens = [num_tokens * rank // num_ranks for rank in range(num_ranks + 1)]
    own = [slice(first, stop) for first, stop in pairwise(tokens)]
    counts = exchange.count_exchanged(KERNELS, ids, tokens, bounds)

    def carried(sent: list[torch.Tensor], table: torch.Tensor, to: int, capacity: int) -> torch.Tensor:
        rows = torch.full((capacity, hidden), torch.nan)
        starts = [int(table[rank, :to].sum()) for rank in range(num_ranks)]
        parts = [
            part[start : start + int(table[rank, to])]
            for rank, (part, start) in enumerate(zip(sent, starts, strict=True))
        ]
        came = torch.cat(parts)
        rows[: len(came)] = came
        return rows

    sent = [exchange.pack_dispatch(KERNELS, x[part], ids[part], bounds) for part in own]
    slots = []
    for rank in range(num_ranks):
        arrived = carried(sent, counts.tokens, rank, num_tokens)
        first, here = int(bounds[rank]), slice(int(bounds[rank]), int(bounds[rank + 1]))
        chose = (exchange.ranks_of_experts(ids, bounds) == rank).any(1)
        assert_same_bits(arrived[: int(chose.sum())], x[chose])
        rows = experts.expert_up(
            KERNELS, arrived, ids, held(up[here]), "silu", gated=True, first_expert=first, compact=True
        )
        slots.append(exchange.expert_slots(KERNELS, rows, ids, held(down[here]), first_expert=first))
    for rank, part in enumerate(own):
        back = carried(slots, counts.slots, rank, ids[part].numel())
        combined = exchange.combine_slots(KERNELS, back, ids[part], slot_weights[part], bounds, shared=shared[part])
        assert_same_bits(combined, expected[part])
