"""What each axis moves, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from scripts.claims.communication import all_reduce_payload

from shardline.models.communication import (
    Traffic,
    context_traffic,
    expert_traffic,
    pipeline_traffic,
    tensor_traffic,
)
from shardline.models.feed_forward import Routing
from shardline.models.partition import Span
from shardline.planner.planned_model import read_planned

_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SPEC = read_planned("70B", _70B).spec
LAYERS = Span(0, 80)


def test_guides_count_80_mb_of_all_reduces_for_32_sequences() -> None:
    payload = all_reduce_payload(SPEC, 32)
    assert payload.num_messages == 160
    assert payload.num_bytes / payload.num_messages == 512 * 1024
    assert payload.num_bytes == pytest.approx(84e6, rel=0.01)


def test_tensor_parallelism() -> None:
    exact = tensor_traffic(SPEC, LAYERS, 4, 1, "exact")
    assert exact.num_bytes == 80 * (8192 + 2 * 8192 + 28672) * 2 * 3 / 4
    assert exact.num_messages == 4 * 80
    theirs = tensor_traffic(SPEC, LAYERS, 4, 1, "vllm")
    assert theirs.num_bytes == 80 * 2 * 2 * 8192 * 2 * 3 / 4
    assert theirs.num_messages == 2 * 80
    assert tensor_traffic(SPEC, LAYERS, 4, 1, "fast").num_bytes == 2 * theirs.num_bytes
    assert exact.num_bytes / theirs.num_bytes == pytest.approx(1.625), "the price of one answer"
    assert tensor_traffic(SPEC, LAYERS, 1, 5, "exact").num_bytes == 0
    assert tensor_traffic(SPEC, Span(0, 40), 4, 7, "exact").num_bytes == exact.num_bytes / 2 * 7


def test_pipelines_hand_over_hidden_states_once_a_boundary() -> None:
    assert pipeline_traffic(SPEC, 2, 32) == Traffic(32 * 8192 * 2, 1)
    assert pipeline_traffic(SPEC, 4, 32, tensor=2) == Traffic(3 * 32 * 8192, 3)
    assert pipeline_traffic(SPEC, 1, 32).num_messages == 0


def test_context_ranks_exchange_what_a_merge_needs() -> None:
    assert context_traffic(SPEC, LAYERS, 2, 1) == Traffic(80 * 64 * (128 + 2) * 4 / 2, 80 * 4)
    assert context_traffic(SPEC, LAYERS, 1, 1).num_bytes == 0


def test_experts() -> None:
    routing = Routing(256, 8)
    assert routing.ranks_met(1) == 1
    assert routing.ranks_met(256) == pytest.approx(8)
    assert 5 < routing.ranks_met(8) < 5.4
    moe = read_planned("m", {"model_type": "mixtral", "num_hidden_layers": 3}).spec
    theirs, ours = (expert_traffic(moe, Span(0, 3), 2, 10, form) for form in ("vllm", "exact"))
    met = 2 * (1 - 4 / 8 * 3 / 7) / 2
    assert theirs.num_bytes == pytest.approx(3 * 5 * 4096 * 2 * met * 2)
    assert ours.num_bytes == pytest.approx(3 * 2 * 4096 * (5 * (met + 1) + 5))
    assert expert_traffic(SPEC, LAYERS, 2, 10, "vllm").num_bytes == 0
