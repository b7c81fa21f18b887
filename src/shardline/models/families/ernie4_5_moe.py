"""ERNIE 4.5 with experts: softmax scores, a learned bias for choosing experts, and shared experts."""

from __future__ import annotations

from msgspec.structs import replace

from shardline.models.config_fields import Defaults
from shardline.models.deepseek_like import DEEPSEEK_MOE_LAYER_KEYS, shared_experts
from shardline.models.feed_forward import Dense, MoE, Routing
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import llama_like, llama_source
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec, TensorSource

_DEFAULTS = Defaults(vocab=103424, hidden=2560, intermediate=12288, layers=28, heads=20, kv_heads=4, positions=131072)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layers for multi-token prediction are left out."""
    hf.only("use_bias", False)
    llama = llama_like(hf, max_model_len, _DEFAULTS, norm=Norm("rms", 1e-5), theta=500_000.0, interleaved=True)
    dense, moe = llama.layer(), llama.layer(feed_forward=_experts(hf, llama.dense))
    return llama.spec((moe if sparse else dense for sparse in _sparse_layers(hf, llama.dims.num_layers)), tied=True)


def _experts(hf: HFConfig, dense: Dense) -> MoE:
    routing = Routing(hf.integer("moe_num_experts", 64), hf.integer("moe_k", 6), correction_bias=True)
    if routing.experts_per_token > routing.num_experts:
        raise hf.error("moe_k", f"must be at most moe_num_experts ({routing.num_experts})")
    expert = replace(dense, intermediate_size=hf.integer("moe_intermediate_size", 1536))
    return MoE(routing, expert, shared_experts(expert, hf.integer("moe_num_shared_experts", 2, minimum=0)))


def _sparse_layers(hf: HFConfig, num_layers: int) -> list[bool]:
    start, end = hf.integer("moe_layer_start_index", 1, minimum=0), hf.integer("moe_layer_end_index", -1, minimum=-1)
    interval, last = hf.integer("moe_layer_interval", 1), num_layers - 1 if end == -1 else end
    return [(index + 1) % interval == 0 and start <= index <= last for index in range(num_layers)]


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    if name.endswith(".feed_forward.router.bias"):
        module = name.removesuffix(".feed_forward.router.bias")
        return TensorSource(f"model.{module}.mlp.moe_statics.e_score_correction_bias", index=(0, 1))
    return llama_source(name, DEEPSEEK_MOE_LAYER_KEYS)
