"""Kimi Linear and Kimi-K3: Kimi delta attention in three of four layers, latent attention without rope in the others.

Kimi delta attention (arXiv 2510.26692) is counted as the gated delta rule with as many key heads as value heads. Its
decay has a number per channel, not per head, from a product of low rank, so a small weight is missing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from shardline.models.config_fields import Defaults, read_dims
from shardline.models.deepseek_like import (
    DEEPSEEK_LAYER_KEYS,
    DEEPSEEK_MOE_LAYER_KEYS,
    latent_attention,
    shared_experts,
)
from shardline.models.feed_forward import Dense, MoE, Routing
from shardline.models.hf_config import HFConfig
from shardline.models.linear_attention import LinearAttention
from shardline.models.llama_like import checkpoint_keys, decoder
from shardline.models.parts import Norm, Rope
from shardline.models.spec import DecoderSpec, Layer

_KEYS: Mapping[str, str] = {
    **DEEPSEEK_LAYER_KEYS,
    **{f"attention.{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attention.z": "self_attn.g_proj",
    "attention.beta": "self_attn.b_proj",
    "attention.decay": "self_attn.f_a_proj",
    **{f"attention.{part}_conv": f"self_attn.{part}_conv1d" for part in "qkv"},
    "attention.decay_log": "self_attn.A_log",
    "attention.decay_offset": "self_attn.dt_bias",
    "attention.norm": "self_attn.o_norm",
    **{
        part: key.replace("mlp.", "block_sparse_moe.")
        for part, key in DEEPSEEK_MOE_LAYER_KEYS.items()
        if part.startswith(("feed_forward.router", "feed_forward.experts", "feed_forward.shared."))
    },
    "feed_forward.latent_down": "block_sparse_moe.routed_down_proj",
    "feed_forward.latent_up": "block_sparse_moe.routed_up_proj",
}
_DEFAULTS = Defaults(vocab=163840, hidden=2304, intermediate=9216, layers=27, heads=32, positions=1048576)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    dims = read_dims(
        hf,
        _DEFAULTS._replace(
            head_dim=hf.integer("qk_rope_head_dim", 64), positions=hf.integer("model_max_length", 1048576)
        ),
    )
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5))
    linear = hf.section("linear_attn_config")
    heads, head_dim = linear.integer("num_heads"), linear.integer("head_dim")
    delta = LinearAttention(heads, heads, head_dim, head_dim, linear.integer("short_conv_kernel_size", 4), norm)
    rope = Rope((0.0,) * (hf.integer("qk_rope_head_dim", 64) // 2))
    latent = latent_attention(hf, dims.num_heads, rope, norm, None)
    dense = Dense(dims.intermediate_size, "silu")
    moe = _experts(hf)
    num_dense = hf.integer("first_k_dense_replace", 1, minimum=0)
    full = set(linear.sizes("full_attn_layers", len(linear.values.get("full_attn_layers") or ())))

    @cache
    def layer(is_full: bool, is_dense: bool) -> Layer:
        return Layer(latent if is_full else delta, dense if is_dense else moe, norm, norm)

    layers = [layer(index + 1 in full, index < num_dense) for index in range(dims.num_layers)]
    return decoder(hf.with_values(model_type="kimi_linear"), dims, norm, layers)


def _experts(hf: HFConfig) -> MoE:
    routing = Routing(
        hf.integer("num_experts"),
        hf.integer("num_experts_per_token"),
        scoring="sigmoid",
        normalized=hf.flag("moe_renormalize", True),
        scale=hf.number("routed_scaling_factor", 1.0),
        correction_bias=True,
    )
    expert = Dense(hf.integer("moe_intermediate_size"), "silu")
    shared = shared_experts(expert, hf.integer("num_shared_experts", 1, minimum=0))
    return MoE(routing, expert, shared, latent=hf.optional_integer("routed_expert_hidden_size", None))


tensor_source = checkpoint_keys(_KEYS)
