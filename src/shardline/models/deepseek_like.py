"""What DeepSeek-like model types share: latent attention, dense first layers, and experts in the other layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

from msgspec.structs import replace

from shardline.models.attention import Positions, Score
from shardline.models.config_fields import Defaults, Dims, read_activation, read_dims
from shardline.models.feed_forward import Dense, MoE, Routing
from shardline.models.hf_config import HFConfig
from shardline.models.indexer import Indexer
from shardline.models.llama_like import MOE_LAYER_KEYS, decoder
from shardline.models.mla import MLA, LatentProjections
from shardline.models.parts import Norm, Rope
from shardline.models.rope import RopeConfig, read_rope
from shardline.models.spec import DecoderSpec, Layer

DEEPSEEK_MOE_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    "feed_forward.router.bias": "mlp.gate.e_score_correction_bias",
    "feed_forward.shared.gate": "mlp.shared_experts.gate_proj",
    "feed_forward.shared.up": "mlp.shared_experts.up_proj",
    "feed_forward.shared.down": "mlp.shared_experts.down_proj",
}
"""See `llama_like.LAYER_KEYS`."""
DEEPSEEK_LAYER_KEYS: Mapping[str, str] = {
    **DEEPSEEK_MOE_LAYER_KEYS,
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
}

SPARSE_LAYER_KEYS: Mapping[str, str] = {
    **DEEPSEEK_LAYER_KEYS,
    "attention.indexer_q": "self_attn.indexer.wq_b",
    "attention.indexer_k": "self_attn.indexer.wk",
    "attention.indexer_weights": "self_attn.indexer.weights_proj",
    "attention.indexer_norm": "self_attn.indexer.k_norm",
}
"""The same with an indexer."""

_LATENT_NORM = Norm("rms", 1e-6)
"""Norm of the latents. Its eps is fixed: the models' own code does not use rms_norm_eps here."""


def deepseek_like(
    hf: HFConfig,
    max_model_len: int | None,
    defaults: Defaults,
    routing: Routing,
    *,
    first_dense: int,
    expert_size: int,
    num_shared: int,
    interleaved: bool,
    bias: bool = False,
    scales_queries: bool = False,
) -> DecoderSpec:
    """A model with latent attention, whose first layers are dense. The other layers have experts.

    `first_dense`, `expert_size` and `num_shared` are what transformers assumes if their keys are missing. `interleaved`
    says that the rope rotates neighbouring elements, `bias` that dense and shared blocks have biases, and
    `scales_queries` that queries grow with their position.

    Raises:
        ValueError: a key is missing, has the wrong type, or needs something that is not supported.
    """
    hf.only("num_key_value_heads", hf.integer("num_attention_heads", defaults.heads))
    hf.only("moe_layer_freq", 1)
    dims = read_dims(hf, defaults._replace(head_dim=hf.integer("qk_rope_head_dim", 64)))
    rope = read_rope(hf, hf.integer("qk_rope_head_dim", 64), dims.max_position_embeddings)
    rotation = replace(rope.build(max_model_len), interleaved=interleaved)
    attention = latent_attention(hf, dims.num_heads, rotation, _LATENT_NORM, 1536, _score_factor(rope))
    if scales_queries:
        attention = attention.changed(query_scale=rope.query_scale())
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6))
    dense = Dense(dims.intermediate_size, read_activation(hf, "hidden_act", "silu"), bias=bias)
    moe = mixture(hf, routing, expert_size=expert_size, num_shared=num_shared, shared_bias=bias)
    layers = dense_first(hf, dims, first_dense, Layer(attention, dense, norm, norm), Layer(attention, moe, norm, norm))
    return decoder(hf, dims, norm, layers, max_length=rope.max_length)


def dense_first(hf: HFConfig, dims: Dims, first_dense: int, dense: Layer, moe: Layer) -> tuple[Layer, ...]:
    """Dense layers, then layers with experts. `first_dense` is the default of first_k_dense_replace."""
    num_dense = min(hf.integer("first_k_dense_replace", first_dense, minimum=0), dims.num_layers)
    return (dense,) * num_dense + (moe,) * (dims.num_layers - num_dense)


def with_indexer(
    hf: HFConfig, dense: DecoderSpec, *, num_heads: int, interleaved: bool, kinds: Sequence[str]
) -> DecoderSpec:
    """A model whose tokens attend to those that an indexer chooses. `num_heads` is the default of its heads; `kinds`
    has "full" for a layer that chooses, and "shared" for one that attends to the choice of the layer before.

    Raises:
        ValueError: a key is missing, has the wrong type, or the kinds are none of these.
    """
    if not isinstance(kinds, Sequence) or len(kinds) != len(dense.layers) or set(kinds) - {"full", "shared"}:
        raise hf.error("indexer_types", f"must have 'full' or 'shared' for each of {len(dense.layers)} layers")
    if hf.optional_integer("q_lora_rank", 1) is None:
        raise hf.error("q_lora_rank", "must be set: the indexer reads the latents of queries")
    if kinds[0] != "full":
        raise hf.error("indexer_types", "must begin with 'full': the first layer has no choice to share")
    indexer = Indexer(
        hf.integer("index_n_heads", num_heads),
        hf.integer("index_head_dim", 128),
        hf.integer("index_topk", 2048),
        interleaved=interleaved,
    )

    @cache
    def sparse(layer: Layer, is_shared: bool) -> Layer:
        assert isinstance(layer.attention, MLA)
        own = replace(indexer, is_shared=True) if is_shared else indexer
        return replace(layer, attention=replace(layer.attention, indexer=own))

    layers = zip(dense.layers, kinds, strict=True)
    return replace(dense, layers=tuple(sparse(layer, kind == "shared") for layer, kind in layers))


def latent_attention(
    hf: HFConfig, num_heads: int, rope: Rope, norm: Norm, q_lora_rank: int | None, factor: float = 1.0
) -> MLA:
    """Latent attention with `norm` over its latents. `q_lora_rank` is a default, and `factor` one of the scores."""
    rotated, nope = 2 * len(rope.inv_freq), hf.integer("qk_nope_head_dim", 128)
    q_lora_rank = hf.optional_integer("q_lora_rank", q_lora_rank)
    linears = LatentProjections(
        kv_lora_rank=hf.integer("kv_lora_rank", 512),
        nope_head_dim=nope,
        rope_head_dim=rotated,
        value_head_dim=hf.integer("v_head_dim", 128),
        kv_norm=norm,
        q_lora_rank=q_lora_rank,
        q_norm=None if q_lora_rank is None else norm,
        bias=hf.flag("attention_bias", False),
    )
    return MLA(num_heads, linears, Score((nope + rotated) ** -0.5 * factor), Positions(rope))


def _score_factor(rope: RopeConfig) -> float:
    """The square of YaRN's mscale. In these models it multiplies the whole score, not only its rotated part."""
    if rope.kind == "default" or not rope.section.values.get("mscale_all_dim"):
        return 1.0
    factor = rope.section.number("factor")
    mscale = 0.1 * rope.section.number("mscale_all_dim") * math.log(factor) + 1.0 if factor > 1 else 1.0
    return mscale * mscale


def group_routing(
    hf: HFConfig, *, num_experts: int | None, chosen: int | None, scale: float, groups: tuple[int, int] = (1, 1)
) -> Routing:
    """DeepSeek V3's routing by groups. The other arguments are what transformers assumes if keys are missing. A key
    whose default is None must be there."""
    return Routing(
        num_experts=hf.integer("n_routed_experts", num_experts),
        experts_per_token=hf.integer("num_experts_per_tok", chosen),
        scoring="sigmoid",
        normalized=hf.flag("norm_topk_prob", True),
        scale=hf.number("routed_scaling_factor", scale),
        num_groups=hf.integer("n_group", groups[0]),
        top_groups=hf.integer("topk_group", groups[1]),
        group_score="top2_sum",
        correction_bias=True,
    )


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
    expert = Dense(hf.integer("moe_intermediate_size", expert_size), read_activation(hf, "hidden_act", "silu"))
    return MoE(
        routing, expert, shared_experts(expert, hf.integer("n_shared_experts", num_shared, minimum=0), shared_bias)
    )


def shared_experts(expert: Dense, count: int, bias: bool = False) -> Dense | None:
    """One block that stands for `count` shared experts; None: there are none."""
    return replace(expert, intermediate_size=count * expert.intermediate_size, bias=bias) if count else None
