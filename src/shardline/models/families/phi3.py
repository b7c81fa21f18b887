"""Phi 3 and 4: Llama with q, k and v in one tensor, and gate and up in another. Rope may rotate only a part of a head,
and may be a long rope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardline.models.config_fields import read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import attention, llama_source, pre_norm_layer
from shardline.models.parameters import parse_name
from shardline.models.rope import read_rope
from shardline.models.spec import GQA, DecoderSpec, Dense, Norm, TensorSource


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf = HFConfig(config)
    dims = read_dims(
        hf,
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        num_layers=32,
        num_heads=32,
        num_kv_heads=None,
        head_dim=None,
        max_position_embeddings=4096,
    )
    hf.only("attention_bias", False)
    rope = read_rope(
        hf,
        dims.head_dim,
        dims.max_position_embeddings,
        partial=True,
        aliases={"su": "longrope", "yarn": "longrope"},
        default_original=4096,
    )
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5))
    layer = pre_norm_layer(
        attention(dims, rope.build(max_model_len), window=hf.optional_integer("sliding_window", None)),
        Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu")),
        norm,
    )
    return DecoderSpec(
        model_type="phi3",
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=(layer,) * dims.num_layers,
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    layer, part, kind = parse_name(name)
    if layer is None:
        return llama_source(name)
    dense = spec.layers[layer].feed_forward
    assert isinstance(dense, Dense)
    size = dense.intermediate_size
    gqa = spec.layers[layer].attention
    assert isinstance(gqa, GQA)
    q_size, kv_size = gqa.num_heads * gqa.head_dim, gqa.num_kv_heads * gqa.head_dim
    fused = {
        "attention.q": ("self_attn.qkv_proj", (0, q_size)),
        "attention.k": ("self_attn.qkv_proj", (q_size, kv_size)),
        "attention.v": ("self_attn.qkv_proj", (q_size + kv_size, kv_size)),
        "feed_forward.gate": ("mlp.gate_up_proj", (0, size)),
        "feed_forward.up": ("mlp.gate_up_proj", (size, size)),
    }
    if part not in fused:
        return llama_source(name)
    key, rows = fused[part]
    return TensorSource(f"model.layers.{layer}.{key}.{kind}", rows=rows)
