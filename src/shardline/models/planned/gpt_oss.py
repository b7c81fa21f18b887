"""gpt-oss: biased projections, a window in every other layer, and experts with biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardline.models.hf_config import HFConfig, read_dims
from shardline.models.llama_layout import MOE_LAYER_KEYS, attention, llama_source, pre_norm_layer, windowed_layers
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Dense, MoE, Norm, Routing, TensorSource

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    "feed_forward.router": "mlp.router",
    "feed_forward.experts.*.gate": "mlp.experts.gate_up_proj",
    "feed_forward.experts.*.up": "mlp.experts.gate_up_proj",
    "feed_forward.experts.*.down": "mlp.experts.down_proj",
}


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=2880,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
    )
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5))
    rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings)
    full = replace(attention(dims, rope.build(max_model_len)), qkv_bias=True, output_bias=True)
    # A router's bias is a parameter of its scores here, not of the choice alone; its size is the same.
    routing = Routing(hf.integer("num_local_experts", 128), hf.integer("num_experts_per_tok", 4), correction_bias=True)
    moe = MoE(routing, Dense(dims.intermediate_size, "silu", bias=True))
    default_types = [("sliding_attention", "full_attention")[index % 2] for index in range(dims.num_layers)]
    windows = hf.layer_windows(dims.num_layers, hf.optional_integer("sliding_window", 128), default_types)
    return DecoderSpec(
        model_type="gpt_oss",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=windowed_layers(windows, lambda window: pre_norm_layer(replace(full, window=window), moe, norm)),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=hf.dtype(),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`. Experts share tensors, so the key names the tensor of all experts."""
    return llama_source(name, _LAYER_KEYS)
