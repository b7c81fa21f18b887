"""Step 3.7: windowed and full attention with norms of q and k, dense first layers, experts with a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import layer_windows, read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import MOE_LAYER_KEYS, attention, llama_source, pre_norm_layer
from shardline.models.moe_config import read_routing
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, Layer, MoE, Norm, TensorSource

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    "feed_forward.router": "moe.gate",
    "feed_forward.experts.*.gate": "moe.gate_proj",
    "feed_forward.experts.*.up": "moe.up_proj",
    "feed_forward.experts.*.down": "moe.down_proj",
    "feed_forward.shared.gate": "share_expert.gate_proj",
    "feed_forward.shared.up": "share_expert.up_proj",
    "feed_forward.shared.down": "share_expert.down_proj",
}

REFUSAL = "the engine has no layers for this model type yet"
"""Why the engine cannot load the model type."""


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layers for multi-token prediction are left out."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=128896,
        hidden_size=4096,
        intermediate_size=11264,
        num_layers=45,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=65536,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5))
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"))
    routing = replace(
        read_routing(hf, num_experts=288, experts_per_token=8, normalized=True),
        scoring="sigmoid",
        scale=hf.number("moe_router_scaling_factor", 1.0),
        correction_bias=hf.flag("use_moe_router_bias", True),
    )
    expert = replace(dense, intermediate_size=hf.integer("moe_intermediate_size", 1280))
    moe = MoE(routing, expert, replace(dense, intermediate_size=hf.integer("share_expert_dim", 1280)))
    num_dense = hf.integer("first_k_dense_replace", 3, minimum=0)
    windows = layer_windows(
        hf, dims.num_layers, hf.optional_integer("sliding_window", 512), ["full_attention"] * dims.num_layers
    )
    made: dict[tuple[int | None, bool], Layer] = {}
    for window in set(windows):
        gqa = replace(attention(dims, rope.build(max_model_len), window=window), qk_norm=norm)
        made[window, True], made[window, False] = pre_norm_layer(gqa, dense, norm), pre_norm_layer(gqa, moe, norm)
    return DecoderSpec(
        model_type="step3p7",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=tuple(made[window, index < num_dense] for index, window in enumerate(windows)),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    return llama_source(name, _LAYER_KEYS)
