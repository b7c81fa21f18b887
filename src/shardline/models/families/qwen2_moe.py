"""Qwen 2 MoE: Qwen 2 with experts in some layers, and a shared expert with a gate for every token."""

from __future__ import annotations

from functools import cache

from msgspec.structs import replace

from shardline.models.config_fields import Defaults, layer_windows, read_routing, sparse_layers
from shardline.models.feed_forward import MoE
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import MOE_LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.spec import DecoderSpec, Layer

_DEFAULTS = Defaults(vocab=151936, hidden=2048, intermediate=5632, layers=24, heads=16, kv_heads=16, positions=32768)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    llama = llama_like(hf, max_model_len, _DEFAULTS)
    gqa = llama.attention.changed(qkv_bias=hf.flag("qkv_bias", True))
    moe = MoE(
        read_routing(hf, num_experts=60, experts_per_token=4, normalized=hf.flag("norm_topk_prob", False)),
        replace(llama.dense, intermediate_size=hf.integer("moe_intermediate_size", 1408)),
        shared=replace(llama.dense, intermediate_size=hf.integer("shared_expert_intermediate_size", 5632)),
        shared_gate=True,
    )

    @cache
    def layer(window: int | None, sparse: bool) -> Layer:
        return llama.layer(gqa.changed(window=window), moe if sparse else llama.dense)

    num_layers = llama.dims.num_layers
    return llama.spec(map(layer, _windows(hf, num_layers), sparse_layers(hf, num_layers)))


def _windows(hf: HFConfig, num_layers: int) -> list[int | None]:
    """The window of each layer. Without `layer_types`, every other layer below max_window_layers has a window."""
    switched_on = hf.flag("use_sliding_window", False)
    window = hf.optional_integer("sliding_window", 4096) if switched_on else None
    num_windowed = hf.integer("max_window_layers", 28, minimum=0) if switched_on else 0
    types = [
        "sliding_attention" if index % 2 == 0 and index < num_windowed else "full_attention"
        for index in range(num_layers)
    ]
    return layer_windows(hf, num_layers, window, types)


tensor_source = checkpoint_keys(MOE_LAYER_KEYS)
