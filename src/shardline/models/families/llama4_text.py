"""Llama 4: attention in chunks with rope in most layers, full attention without rope in the others, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from msgspec.structs import replace

from shardline.models.config_fields import Defaults, layer_windows
from shardline.models.feed_forward import MoE, Routing
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import MOE_LAYER_KEYS, StackedExperts, checkpoint_keys, llama_like
from shardline.models.parts import Norm, QueryScale
from shardline.models.rope import rotated_layers
from shardline.models.spec import DecoderSpec, Layer

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    "feed_forward.router": "feed_forward.router",
    "feed_forward.gate": "feed_forward.gate_proj",
    "feed_forward.up": "feed_forward.up_proj",
    "feed_forward.down": "feed_forward.down_proj",
    "feed_forward.shared.gate": "feed_forward.shared_expert.gate_proj",
    "feed_forward.shared.up": "feed_forward.shared_expert.up_proj",
    "feed_forward.shared.down": "feed_forward.shared_expert.down_proj",
}
_DEFAULTS = Defaults(
    vocab=202048, hidden=5120, intermediate=8192, layers=48, heads=40, kv_heads=8, head_dim=128, positions=131072
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. Layers with rope normalise q and k; queries of the others grow with their position."""
    llama = llama_like(hf, max_model_len, _DEFAULTS, norm=Norm("rms", 1e-5), theta=500_000.0, interleaved=True)
    num_layers = llama.dims.num_layers
    is_rotated = rotated_layers(hf, num_layers)
    windows = layer_windows(
        hf,
        num_layers,
        hf.optional_integer("attention_chunk_size", 8192),
        ["chunked_attention" if rotated else "full_attention" for rotated in is_rotated],
        windowed="chunked_attention",
        window_key="attention_chunk_size",
    )
    gqa = llama.biased()
    rotated_norm = llama.norm if hf.flag("use_qk_norm", True) else None
    query_scale = None
    if hf.flag("attn_temperature_tuning", True):
        query_scale = QueryScale(hf.number("attn_scale", 0.1), hf.integer("floor_scale", 8192), offset=1)
    hf.only("num_experts_per_tok", 1)
    routing = Routing(hf.integer("num_local_experts", 16), 1, scoring="sigmoid", normalized=False, scales_input=True)
    moe = MoE(routing, llama.dense, shared=llama.dense)
    dense = replace(llama.dense, intermediate_size=hf.integer("intermediate_size_mlp", 16384))

    @cache
    def layer(sparse: bool, rotated: bool, window: int | None) -> Layer:
        own = gqa.changed(window=window, chunked=window is not None)
        own = own.changed(rotated_norm=rotated_norm) if rotated else own.changed(rope=None, query_scale=query_scale)
        return llama.layer(own, moe if sparse else dense)

    return llama.spec(map(layer, _sparse_layers(hf, num_layers), is_rotated, windows))


def _sparse_layers(hf: HFConfig, num_layers: int) -> list[bool]:
    """Whether each layer has experts."""
    given, step = hf.values.get("moe_layers"), hf.integer("interleave_moe_layer_step", 1)
    if given is None:
        return [(index + 1) % step == 0 for index in range(num_layers)]
    if not isinstance(given, list) or not all(isinstance(index, int) for index in given):
        raise hf.error("moe_layers", f"must be a list of layer numbers, got {given!r:.80}")
    return [index in given for index in range(num_layers)]


tensor_source = checkpoint_keys(_LAYER_KEYS, stacked=StackedExperts("feed_forward.experts"))
