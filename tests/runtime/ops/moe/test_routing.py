from __future__ import annotations

import itertools

import pytest
import torch

from shardline import _cpu
from shardline.models.feed_forward import Routing
from shardline.runtime.ops.moe.routing import route_experts, route_experts_reference
from tests.runtime.ops.helpers import KERNELS, assert_same_bits, randn

ROUTINGS = [
    Routing(8, 2),
    Routing(60, 4, normalized=False),
    Routing(128, 8, scale=2.5),
    Routing(1, 1),
    Routing(5, 5, scoring="sigmoid"),
    Routing(160, 6, normalized=False, scale=16.0, num_groups=8, top_groups=3),
    Routing(256, 8, scoring="sigmoid", scale=2.5, num_groups=8, top_groups=4, group_score="top2_sum"),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=[f"{r.num_experts}-{r.scoring}" for r in ROUTINGS])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.usefixtures("isa")
def test_matches_reference(rng, routing, biased):
    logits = randn(300, routing.num_experts, rng=rng) * 2
    bias = randn(routing.num_experts, rng=rng) * 0.1 if biased else None
    ids, weights = route_experts(KERNELS, logits, routing, bias)
    expected_ids, expected_weights = route_experts_reference(logits.double(), routing, bias)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights.float(), atol=1e-7, rtol=2e-6)


@pytest.mark.usefixtures("isa")
def test_ties_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [0.0] * 5])
    ids, weights = route_experts(KERNELS, logits, Routing(5, 2))
    assert ids.tolist() == [[1, 2], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    grouped = Routing(4, 1, num_groups=2)
    assert route_experts(KERNELS, torch.tensor([[1.0, 2.0, 2.0, 0.0]]), grouped)[0].tolist() == [[1]]


@pytest.mark.usefixtures("isa")
def test_a_token_does_not_depend_on_the_others(rng):
    routing = Routing(60, 4, normalized=False)
    logits = randn(1000, 61, rng=rng)
    scale = torch.empty(1000)
    ids, weights = route_experts(KERNELS, logits, routing, shared_scale=scale)
    torch.testing.assert_close(scale, logits[:, 60].sigmoid(), atol=1e-7, rtol=2e-6)
    for start, stop in [(0, 1), (5, 7), (999, 1000), (130, 700)]:
        part = torch.empty(stop - start)
        some_ids, some_weights = route_experts(KERNELS, logits[start:stop], routing, shared_scale=part)
        assert torch.equal(some_ids, ids[start:stop])
        assert_same_bits(some_weights, weights[start:stop])
        assert_same_bits(part, scale[start:stop])


def test_counts_grow(rng):
    routing = Routing(9, 3)
    counts = torch.arange(9)
    ids, _ = route_experts(KERNELS, randn(50, 9, rng=rng), routing, counts=counts)
    expected = torch.arange(9) + torch.bincount(ids.flatten().long(), minlength=9)
    assert torch.equal(counts, expected)


def test_ids_stay_in_range_whatever_the_logits():
    values = [float("nan"), float("inf"), -float("inf"), 0.0]
    logits = torch.tensor(list(itertools.product(values, repeat=4)))
    for routing in (Routing(4, 3), Routing(4, 2, num_groups=2), Routing(4, 3, scoring="sigmoid")):
        ids, _ = route_experts(KERNELS, logits, routing)
        assert ((ids >= 0) & (ids < 4)).all()


def test_threads_change_no_bits(rng):
    logits = randn(700, 128, rng=rng)
    expected = route_experts(KERNELS, logits, Routing(128, 8))
    _cpu.set_num_threads(3)
    actual = route_experts(KERNELS, logits, Routing(128, 8))
    _cpu.set_num_threads(1)
    assert torch.equal(actual[0], expected[0])
    assert_same_bits(actual[1], expected[1])


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(4, 5), "at most those that are eligible"),
        (Routing(4, 3, num_groups=2), "at most those that are eligible"),
        (Routing(4, 1, num_groups=3), "equal size"),
    ],
)
def test_refuses_impossible_routings(routing, message):
    with pytest.raises(ValueError, match=message):
        route_experts(KERNELS, torch.zeros(2, 4), routing)
