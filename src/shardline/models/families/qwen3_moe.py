"""Qwen 3 MoE: Qwen 3 with experts in some layers, and no shared experts."""

from __future__ import annotations

from msgspec.structs import replace

from shardline.models.config_fields import Defaults, read_routing, sparse_layers
from shardline.models.feed_forward import MoE
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import MOE_LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(vocab=151936, hidden=2048, intermediate=6144, layers=24, heads=32, kv_heads=4, positions=32768)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    llama = llama_like(hf, max_model_len, _DEFAULTS)
    window = hf.optional_integer("sliding_window", 4096) if hf.flag("use_sliding_window", False) else None
    gqa = llama.biased(window=window, qk_norm=llama.norm)
    routing = read_routing(hf, num_experts=128, experts_per_token=8, normalized=hf.flag("norm_topk_prob", False))
    expert = replace(llama.dense, intermediate_size=hf.integer("moe_intermediate_size", 768))
    moe, dense = llama.layer(gqa, MoE(routing, expert)), llama.layer(gqa)
    return llama.spec(moe if sparse else dense for sparse in sparse_layers(hf, llama.dims.num_layers))


tensor_source = checkpoint_keys(MOE_LAYER_KEYS)
