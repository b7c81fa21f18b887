"""What DeepSeek V2 and V3 share: latent attention, dense first layers, and experts in the other layers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec.structs import replace

from shardline.models.config_fields import Dims, read_activation, read_dims, read_dtype
from shardline.models.hf_config import HFConfig
from shardline.models.llama_layout import MOE_LAYER_KEYS
from shardline.models.rope import RopeConfig, read_rope
from shardline.models.spec import MLA, DecoderSpec, Dense, Layer, MoE, Norm, Routing

DEEPSEEK_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "feed_forward.shared.gate": "mlp.shared_experts.gate_proj",
    "feed_forward.shared.up": "mlp.shared_experts.up_proj",
    "feed_forward.shared.down": "mlp.shared_experts.down_proj",
}
"""See `llama_layout.MOE_LAYER_KEYS`."""

_LATENT_NORM = Norm("rms", 1e-6)
"""Norm of the latents. Its eps is fixed: the models' own code does not use rms_norm_eps here."""


def read_deepseek_dims(hf: HFConfig, **defaults: int) -> Dims:
    """The sizes that other decoders have too. For `defaults` see `read_dims`.

    Raises:
        ValueError: a size is wrong, or the configuration needs something that is not supported.
    """
    hf.only("num_key_value_heads", hf.integer("num_attention_heads", defaults["num_heads"]))
    hf.only("moe_layer_freq", 1)
    return read_dims(hf, num_kv_heads=None, head_dim=hf.integer("qk_rope_head_dim", 64), **defaults)


def latent_attention(hf: HFConfig, dims: Dims, max_model_len: int | None, interleaved: bool) -> tuple[MLA, int]:
    """The attention of every layer, and the length of the longest sequence that its rope allows."""
    rope_head_dim, nope_head_dim = hf.integer("qk_rope_head_dim", 64), hf.integer("qk_nope_head_dim", 128)
    rope = read_rope(hf, rope_head_dim, dims.max_position_embeddings)
    q_lora_rank = hf.optional_integer("q_lora_rank", 1536)
    mla = MLA(
        num_heads=dims.num_heads,
        kv_lora_rank=hf.integer("kv_lora_rank", 512),
        nope_head_dim=nope_head_dim,
        rope_head_dim=rope_head_dim,
        value_head_dim=hf.integer("v_head_dim", 128),
        scale=(nope_head_dim + rope_head_dim) ** -0.5 * _score_factor(rope),
        rope=replace(rope.build(max_model_len), interleaved=interleaved),
        kv_norm=_LATENT_NORM,
        q_lora_rank=q_lora_rank,
        q_norm=None if q_lora_rank is None else _LATENT_NORM,
        bias=hf.flag("attention_bias", False),
    )
    return mla, rope.max_length


def _score_factor(rope: RopeConfig) -> float:
    """The square of YaRN's mscale. In these models it multiplies the whole score, not only its rotated part."""
    if rope.kind == "default" or not rope.section.values.get("mscale_all_dim"):
        return 1.0
    factor = rope.section.number("factor")
    mscale = 0.1 * rope.section.number("mscale_all_dim") * math.log(factor) + 1.0 if factor > 1 else 1.0
    return mscale * mscale


def mixture(hf: HFConfig, routing: Routing, *, expert_size: int, num_shared: int, shared_bias: bool = False) -> MoE:
    """Experts of `expert_size`, and one block that stands for all shared experts.

    Raises:
        ValueError: the experts do not divide into the groups, or a token needs more experts than are eligible.
    """
    if routing.num_experts % routing.num_groups:
        raise hf.error("n_group", f"must divide n_routed_experts ({routing.num_experts}), got {routing.num_groups}")
    if routing.top_groups > routing.num_groups:
        raise hf.error("topk_group", f"must be at most n_group ({routing.num_groups}), got {routing.top_groups}")
    if routing.group_score == "top2_sum" and routing.num_experts < 2 * routing.num_groups:
        raise hf.error("n_group", f"must leave at least two experts a group, got {routing.num_groups}")
    eligible = routing.num_experts // routing.num_groups * routing.top_groups
    if routing.experts_per_token > eligible:
        raise hf.error("num_experts_per_tok", f"is {routing.experts_per_token}, and only {eligible} are eligible")
    expert_size = hf.integer("moe_intermediate_size", expert_size)
    num_shared = hf.integer("n_shared_experts", num_shared, minimum=0)
    expert = Dense(expert_size, read_activation(hf, "hidden_act", "silu"))
    shared = replace(expert, intermediate_size=expert_size * num_shared, bias=shared_bias) if num_shared else None
    return MoE(routing, expert, shared)


def deepseek_spec(
    hf: HFConfig,
    dims: Dims,
    attention: MLA,
    dense: Dense,
    moe: MoE,
    *,
    first_dense: int,
    max_position_embeddings: int,
) -> DecoderSpec:
    """A model whose first `first_dense` layers are dense. The other layers have experts."""
    model_type, norm = hf.text("model_type"), Norm("rms", hf.number("rms_norm_eps", 1e-6))
    num_dense = min(first_dense, dims.num_layers)
    dense_layer = Layer(attention, dense, norm, norm)
    moe_layer = Layer(attention, moe, norm, norm)
    return DecoderSpec(
        model_type=model_type,
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=(dense_layer,) * num_dense + (moe_layer,) * (dims.num_layers - num_dense),
        final_norm=norm,
        max_position_embeddings=max_position_embeddings,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )
