"""MiniMax-M3: an indexer chooses blocks of tokens in most layers; dense first layers, experts with a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import layer_flags, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import MOE_LAYER_KEYS, llama_source, pre_norm_layer
from shardline.models.moe_config import read_routing
from shardline.models.parameters import parse_name
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, Indexer, Layer, MoE, Norm, PlannedGQA, TensorSource

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    "feed_forward.router": "block_sparse_moe.gate",
    "feed_forward.experts.*.gate": "block_sparse_moe.experts.*.w1",
    "feed_forward.experts.*.up": "block_sparse_moe.experts.*.w3",
    "feed_forward.experts.*.down": "block_sparse_moe.experts.*.w2",
    "feed_forward.shared.gate": "block_sparse_moe.shared_experts.gate_proj",
    "feed_forward.shared.up": "block_sparse_moe.shared_experts.up_proj",
    "feed_forward.shared.down": "block_sparse_moe.shared_experts.down_proj",
}

REFUSAL = "an indexer chooses the tokens of its attention, which the engine does not have"
"""Why the engine cannot load the model type."""


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layers for multi-token prediction are left out.

    The configuration does not say how the indexer's keys are cached. They are counted as in DeepSeek-V3.2.
    """
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=200064,
        hidden_size=6144,
        intermediate_size=3072,
        num_layers=60,
        num_heads=64,
        num_kv_heads=4,
        head_dim=128,
        max_position_embeddings=1048576,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings, default_theta=5e6, partial=True)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6), weight_offset=float(hf.flag("use_gemma_norm", False)))
    full = PlannedGQA(
        dims.num_heads,
        dims.num_kv_heads,
        dims.head_dim,
        dims.head_dim**-0.5,
        rope=rope.build(max_model_len),
        qk_norm=norm if hf.flag("use_qk_norm", True) else None,
        output_gate=hf.flag("attention_output_gate", False),
    )
    sparse = hf.section("sparse_attention_config")
    indexer = Indexer(
        sparse.integer("sparse_num_index_heads", 4),
        sparse.integer("sparse_index_dim", 128),
        sparse.integer("sparse_topk_blocks", 16) * sparse.integer("sparse_block_size", 128),
    )
    dense = Dense(hf.integer("dense_intermediate_size", 12288), "clamped_swish")
    routing = replace(
        read_routing(hf, num_experts=128, experts_per_token=4, normalized=True),
        scoring="sigmoid",
        scale=hf.number("routed_scaling_factor", 1.0),
        correction_bias=hf.flag("use_routing_bias", True),
    )
    shared_size = hf.integer("n_shared_experts", 1, minimum=0) * hf.integer("shared_intermediate_size", 3072)
    shared = replace(dense, intermediate_size=shared_size) if shared_size else None
    moe = MoE(routing, replace(dense, intermediate_size=hf.integer("moe_intermediate_size", 3072)), shared)
    chooses = layer_flags(sparse, "sparse_attention_freq", dims.num_layers)
    kinds = list(zip(chooses, layer_flags(hf, "moe_layer_freq", dims.num_layers), strict=True))
    made: dict[tuple[bool, bool], Layer] = {
        kind: pre_norm_layer(replace(full, indexer=indexer) if kind[0] else full, moe if kind[1] else dense, norm)
        for kind in set(kinds)
    }
    return DecoderSpec(
        model_type="minimax_m3",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=tuple(made[kind] for kind in kinds),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    layer, part, kind = parse_name(name)
    if part.startswith("attention.indexer"):
        return TensorSource(f"model.layers.{layer}.self_attn.{part.removeprefix('attention.')}.{kind}")
    return llama_source(name, _LAYER_KEYS)
