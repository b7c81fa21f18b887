"""GLM-4.5 to 4.7: DeepSeek V3's experts, with grouped-query attention whose rope rotates half a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.config_fields import read_activation, read_dims, read_dtype
from shardline.models.deepseek_layout import DEEPSEEK_LAYER_KEYS, mixture
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import LAYER_KEYS, attention, llama_source, pre_norm_layer
from shardline.models.parameters import parse_name
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, Norm, Routing, TensorSource

_LAYER_KEYS: Mapping[str, str] = {**DEEPSEEK_LAYER_KEYS, **LAYER_KEYS}


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layers for multi-token prediction are left out."""
    hf = HFConfig({"partial_rotary_factor": 0.5, **config})
    dims = read_dims(
        hf,
        vocab_size=151552,
        hidden_size=4096,
        intermediate_size=10944,
        num_layers=46,
        num_heads=96,
        num_kv_heads=8,
        head_dim=None,
        max_position_embeddings=131072,
    )
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings, partial=True)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5))
    gqa = replace(
        attention(dims, rope.build(max_model_len)),
        qkv_bias=hf.flag("attention_bias", False),
        qk_norm=norm if hf.flag("use_qk_norm", False) else None,
    )
    routing = Routing(
        num_experts=hf.integer("n_routed_experts", 128),
        experts_per_token=hf.integer("num_experts_per_tok", 8),
        scoring="sigmoid",
        normalized=hf.flag("norm_topk_prob", True),
        scale=hf.number("routed_scaling_factor", 1.0),
        num_groups=hf.integer("n_group", 1),
        top_groups=hf.integer("topk_group", 1),
        group_score="top2_sum",
        correction_bias=True,
    )
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"))
    num_dense = min(hf.integer("first_k_dense_replace", 1, minimum=0), dims.num_layers)
    dense_layer = pre_norm_layer(gqa, dense, norm)
    moe_layer = pre_norm_layer(gqa, mixture(hf, routing, expert_size=1408, num_shared=1), norm)
    return DecoderSpec(
        model_type="glm4_moe",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=(dense_layer,) * num_dense + (moe_layer,) * (dims.num_layers - num_dense),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    layer, part, kind = parse_name(name)
    if part == "feed_forward.router" and kind == "bias":
        return TensorSource(f"model.layers.{layer}.mlp.gate.e_score_correction_bias")
    return llama_source(name, _LAYER_KEYS)
