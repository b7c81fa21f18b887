"""Families that only the planner knows: their sizes equal those that their publishers state."""

from __future__ import annotations

import math

import pytest

from shardline.models.attention import GQA
from shardline.models.feed_forward import MoE
from shardline.models.linear_attention import LinearAttention
from shardline.models.mla import MLA
from shardline.models.parameters import counted_parameters
from shardline.models.partition import Span
from shardline.models.sharding import shard, shard_shape
from shardline.models.sizes import checkpoint_bytes
from shardline.models.spec import DecoderSpec
from shardline.models.step_work import attention_work
from shardline.planner.catalog import find_model
from shardline.planner.models.parts.compressed import CompressedMQA, cache_rows
from shardline.planner.planned_model import read_planned

PUBLISHED = {
    "XiaomiMiMo/MiMo-V2-Flash": (309, 15),
    "stepfun-ai/Step-3.7-Flash": (196, 11),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.6, 3.6),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (120.6, 12.7),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": (550, 55),
    "nvidia/Nemotron-H-56B-Base-8K": (56, 56),
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1": (49.9, 49.9),
}
"""Billions of parameters, in all and for each token."""


def count(spec: DecoderSpec) -> tuple[float, float]:
    """Billions of parameters in all, and for each token, embeddings included."""
    total = active = 0
    for one in counted_parameters(spec, Span(0, len(spec.layers))):
        size = math.prod(one.shape) * one.num_layers
        total += size * max(1, one.num_experts)
        if one.num_experts:
            feed_forward = spec.layers[int(one.name.split(".")[1])].feed_forward
            assert isinstance(feed_forward, MoE)
            size *= feed_forward.routing.experts_per_token
        active += size
    return total / 1e9, active / 1e9


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_that_are_published(name: str) -> None:
    total, active = count(find_model(name).spec)
    assert total == pytest.approx(PUBLISHED[name][0], rel=0.01)
    assert active == pytest.approx(PUBLISHED[name][1], rel=0.04)


def test_nemotron_caches_keys_and_values_in_few_layers() -> None:
    spec = find_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16").spec
    kinds = [layer.attention for layer in spec.layers]
    assert sum(isinstance(kind, GQA) for kind in kinds) == 6
    assert sum(isinstance(kind, LinearAttention) for kind in kinds) == 23
    assert sum(isinstance(layer.feed_forward, MoE) for layer in spec.layers) == 23
    # 6 layers, keys and values of 2 heads of 128 in 16 bits
    assert sum(part.num_bytes for kind in kinds for part in kind.kv_parts(2, 1, 1, "bfloat16")) == 6 * 1024


def test_kimi_k3_mixes_latent_and_recurrent_layers() -> None:
    spec = find_model("moonshotai/Kimi-K3").spec
    assert sum(isinstance(layer.attention, MLA) for layer in spec.layers) == 24
    assert sum(isinstance(layer.attention, LinearAttention) for layer in spec.layers) == 69


def test_the_indexer_of_minimax_m3_has_a_cache() -> None:
    spec = find_model("MiniMaxAI/MiniMax-M3").spec
    first, last = spec.layers[0].attention, spec.layers[-1].attention
    sizes = [sum(part.num_bytes for part in one.kv_parts(4, 1, 1, "bfloat16")) for one in (first, last)]
    assert sizes == [2 * 4 * 128 * 2, 2 * 4 * 128 * 2 + 128 + 4]


FLASH, PRO = "deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro"


@pytest.mark.parametrize(("name", "total", "active"), [(FLASH, 284, 13), (PRO, 1573, 49)])
def test_sizes_of_deepseek_v4(name: str, total: float, active: float) -> None:
    """284 billion, 1.6 trillion, and 13 and 49 for each token: without the embedding, by the publisher."""
    spec = find_model(name).spec
    found, used = count(spec)
    assert found == pytest.approx(total, rel=0.01)
    assert round(found, -2) == round(total, -2)
    assert used - spec.vocab_size * spec.hidden_size / 1e9 == pytest.approx(active, rel=0.025)


def test_the_checkpoint_of_deepseek_v4_has_the_published_bytes() -> None:
    """159.61 GB, by the index of its files, of which the layer for multi-token prediction is one of 44 alike."""
    model = find_model(FLASH)
    assert checkpoint_bytes(model.spec, model.stored()) / 1e9 == pytest.approx(159.61 * 43 / 44, rel=0.01)
    for name, low, high in (
        ("nvidia/DeepSeek-V4-Flash-NVFP4", 160, 170),
        ("sgl-project/DeepSeek-V4-Flash-FP8", 284, 289),
    ):
        other = find_model(name)
        assert low < checkpoint_bytes(other.spec, other.stored()) / 1e9 < high


def test_the_cache_of_deepseek_v4_follows_its_ratios() -> None:
    """vLLM's announcement counts 9.62 GiB for 1,048,576 tokens of Pro in 16 bits."""
    spec = find_model(PRO).spec
    kinds = [layer.attention for layer in spec.layers]
    assert all(isinstance(kind, CompressedMQA) for kind in kinds)
    rows = [cache_rows(kind, "bfloat16")[1:] for kind in kinds if isinstance(kind, CompressedMQA)]
    found = [sum(part.num_bytes / part.ratio for part in parts if part is not None) for parts in rows]
    # 512 elements for 4 tokens, with a key of 128; or 512 elements for 128 tokens
    assert [found.count(1024 / 4 + 256 / 4), found.count(1024 / 128)] == [30, 31]
    assert sum(found) * 2**20 / 2**30 == pytest.approx(9.62, abs=0.005)
    windows = [layer.attention.window for layer in find_model(FLASH).spec.layers]
    assert windows == [128, 128, *[None] * 41]


def test_a_step_of_deepseek_v4_reads_the_chosen_entries() -> None:
    """Of a million tokens: 128 of the window, then 1,024 entries and all keys of the indexer, or all of few entries."""
    spec = find_model(PRO).spec
    row, key, length = 448 + 64 * 2 + 8, 128 + 4, 2**20
    for stage, read in ((Span(2, 3), 1024 * row + length / 4 * key), (Span(3, 4), length / 128 * row)):
        found = attention_work(spec, stage, 8, "float8_e4m3fn")
        seen = sum(one.bytes_per_token * min(length, one.window or length) for one in found)
        assert seen == 128 * row + read


def test_an_indexer_reads_the_keys_of_all_tokens() -> None:
    """DeepSeek-V3.2: latents of 576 elements of 2,048 tokens, and a key of 128 elements for each token."""
    indexer, attention = attention_work(find_model("deepseek-ai/DeepSeek-V3.2").spec, Span(5, 6), 8, "bfloat16")
    assert (attention.window, attention.bytes_per_token) == (2048, 576 * 2)
    assert (indexer.window, indexer.bytes_per_token, indexer.decode_flops) == (None, 2 * 128, 2 * 64 * 128)


@pytest.mark.parametrize(
    "name",
    ["XiaomiMiMo/MiMo-V2-Flash", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "deepseek-ai/DeepSeek-V4-Flash"],
)
def test_ranks_share_every_weight(name: str) -> None:
    spec = find_model(name).spec
    layers = {id(layer): index for index, layer in enumerate(spec.layers)}
    for index in layers.values():
        for one in counted_parameters(spec, Span(index, index + 1)):
            pieces = [math.prod(shard_shape(one.shape, shard(one.name, spec, rank, 2))) for rank in range(2)]
            assert sum(pieces) == math.prod(one.shape) or pieces == [math.prod(one.shape)] * 2, one.name


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"hybrid_override_pattern": "EM"}, "follows no Mamba or attention block"),
        ({"hybrid_override_pattern": "MX"}, "has 'X'"),
        ({"layers_block_type": ["mamba", "rwkv"]}, "has 'rwkv'"),
    ],
)
def test_a_pattern_that_makes_no_sense(config: dict[str, object], problem: str) -> None:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    with pytest.raises(ValueError, match=problem):
        read_planned("m", {"model_type": "nemotron_h", **experts, **config})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "compress_ratios must have a number for each of 43 layers"),
        ({"compress_ratios": [0] * 42 + [-4]}, "has -4"),
        ({"compress_ratios": [0] * 43, "o_groups": 5}, "o_groups must divide"),
        ({"compress_ratios": [0] * 43, "num_key_value_heads": 2}, "num_key_value_heads"),
    ],
)
def test_a_deepseek_v4_that_makes_no_sense(config: dict[str, object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_planned("m", {"model_type": "deepseek_v4", **config})
