"""Gemma 4: windowed layers; full layers with wider heads, whose values may be their keys; experts beside a dense block.

In the small models, every layer has an embedding of its own for each token, and the last layers read the keys and
values of earlier ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from msgspec.structs import replace

from shardline.models.attention import GQA
from shardline.models.config_fields import Defaults, Dims, full_every, layer_windows, read_dims
from shardline.models.feed_forward import Dense, MoE, Routing
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import (
    FOUR_NORM_LAYER_KEYS,
    MOE_LAYER_KEYS,
    StackedExperts,
    checkpoint_keys,
    llama_like,
)
from shardline.models.parameters import parse_name
from shardline.models.parts import Norm
from shardline.models.rope import proportional_rope, read_rope, rope_sections
from shardline.models.spec import DecoderSpec, Layer, TensorSource, TokenInput

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    **FOUR_NORM_LAYER_KEYS,
    "feed_forward.router": "router.proj",
    "feed_forward.experts_norm": "pre_feedforward_layernorm_2",
    "feed_forward.experts_output_norm": "post_feedforward_layernorm_2",
    "feed_forward.shared_output_norm": "post_feedforward_layernorm_1",
    "feed_forward.shared.gate": "mlp.gate_proj",
    "feed_forward.shared.up": "mlp.up_proj",
    "feed_forward.shared.down": "mlp.down_proj",
    "token_input.gate": "per_layer_input_gate",
    "token_input.down": "per_layer_projection",
    "token_input.norm": "post_per_layer_input_norm",
    "output_scale.bias": "layer_scalar",
    "feed_forward.expert_scale.bias": "router.per_expert_scale",
    "feed_forward.router_norm.weight": "router.scale",
}
_DEFAULTS = Defaults(
    vocab=262144, hidden=2304, intermediate=9216, layers=30, heads=8, kv_heads=4, head_dim=256, positions=131072
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf.only("use_bidirectional_attention", "vision")
    dims = read_dims(hf, _DEFAULTS)
    llama = llama_like(
        hf,
        max_model_len,
        _DEFAULTS,
        norm=Norm("rms", 1e-6, rounds_once=True),
        rope=read_rope(hf, dims.head_dim, dims.max_position_embeddings, section=rope_sections(hf)[1]),
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
    )
    norm, dense = llama.norm, llama.dense
    windowed = llama.biased(scale=1.0, qk_norm=norm, value_norm=norm)
    full = _full_attention(hf, dims, windowed)
    has_experts, widens = hf.flag("enable_moe_block", False), hf.flag("use_double_wide_mlp", False)
    wide = replace(dense, intermediate_size=2 * dims.intermediate_size) if widens else dense
    token_input = _token_input(hf, dims, dense, norm)
    types = full_every(6, dims.num_layers)
    windows = layer_windows(hf, dims.num_layers, hf.optional_integer("sliding_window", 512), types)
    windows[-1] = None

    @cache
    def layer(window: int | None, source: int | None) -> Layer:
        gqa = (full if window is None else windowed.changed(window=window)).changed(kv_source=source)
        block = dense if source is None else wide
        made = llama.four_norm_layer(gqa, _experts(hf, dims, block, norm) if has_experts else block)
        return replace(made, output_scale=True, token_input=token_input)

    return replace(
        llama.spec(map(layer, windows, _kv_sources(hf, windows)), tied=True),
        max_position_embeddings=dims.max_position_embeddings,
        embedding_scale=dims.hidden_size**0.5,
        logits_softcap=hf.optional_number("final_logit_softcapping", None),
    )


def _token_input(hf: HFConfig, dims: Dims, dense: Dense, norm: Norm) -> TokenInput | None:
    size = hf.integer("hidden_size_per_layer_input", 256, minimum=0)
    if not size:
        return None
    vocab_size = hf.integer("vocab_size_per_layer_input", 262144)
    if vocab_size < dims.vocab_size:
        raise hf.error("vocab_size_per_layer_input", f"must be vocab_size ({dims.vocab_size}) or more")
    return TokenInput(size, vocab_size, dense.activation, norm)


def _kv_sources(hf: HFConfig, windows: list[int | None]) -> list[int | None]:
    """For each layer the one whose keys and values it reads, or None if it has its own.

    The last layers read those of the last layer of their kind that has its own.
    """
    first = len(windows) - hf.integer("num_kv_shared_layers", 0, minimum=0)
    own = dict(zip(windows[: max(0, first)], range(len(windows)), strict=False))
    if set(windows) - own.keys():
        raise hf.error(
            "num_kv_shared_layers", f"leaves no layer of some kind with keys and values: {len(windows)} layers"
        )
    return [None if index < first else own[window] for index, window in enumerate(windows)]


def _full_attention(hf: HFConfig, dims: Dims, windowed: GQA) -> GQA:
    """Attention of the layers without a window. Newer files state its sizes for each of these layers."""
    is_key = hf.flag("attention_k_eq_v", False)
    num_kv_heads = dims.num_kv_heads
    if hf.has("per_layer_config"):
        layers = [value for value in hf.section("per_layer_config").values.values() if isinstance(value, Mapping)]
        sizes = HFConfig(layers[0] if layers else {}, "per_layer_config.")
        head_dim = sizes.integer("head_dim", dims.head_dim)
        num_kv_heads = sizes.integer("num_key_value_heads", num_kv_heads)
    else:
        head_dim = hf.integer("global_head_dim", 512)
        num_kv_heads = hf.integer("num_global_key_value_heads", num_kv_heads) if is_key else num_kv_heads
    if dims.num_heads % num_kv_heads:
        raise hf.error("num_global_key_value_heads", f"must divide num_attention_heads ({dims.num_heads})")
    section = hf.section("rope_parameters").section("full_attention")
    if section.text("rope_type", "proportional") != "proportional":
        raise section.error("rope_type", "must be proportional")
    rope = proportional_rope(section, head_dim, default_theta=1e6, default_fraction=0.25)
    return windowed.changed(num_kv_heads=num_kv_heads, head_dim=head_dim, rope=rope, value_is_key=is_key)


def _experts(hf: HFConfig, dims: Dims, dense: Dense, norm: Norm) -> MoE:
    routing = Routing(
        hf.integer("num_experts"),
        hf.integer("top_k_experts"),
        logits_scale=dims.hidden_size**-0.5,
        expert_scale=True,
    )
    expert = replace(dense, intermediate_size=hf.integer("moe_intermediate_size"))
    return MoE(routing, expert, shared=dense, own_norms=norm)


_other_source = checkpoint_keys(_LAYER_KEYS, stacked=StackedExperts("experts", transposed=False))


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`. The tables and projections of all layers' own inputs are stored side by side."""
    layer, part, _ = parse_name(name)
    if part == "token_input_norm":
        return TensorSource("model.per_layer_projection_norm.weight")
    if spec.token_input is not None and layer is not None:
        own = layer * spec.token_input.size, spec.token_input.size
        if part == "token_input.embed":
            return TensorSource("model.embed_tokens_per_layer.weight", columns=own)
        if part == "token_input.projection":
            return TensorSource("model.per_layer_model_projection.weight", rows=own)
    return _other_source(name, spec)
