"""MiMo-V2-Flash: windowed and full attention with sinks, smaller value heads, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from msgspec.structs import asdict, replace

from shardline.models.config_fields import Defaults, layer_flags
from shardline.models.deepseek_like import group_routing
from shardline.models.feed_forward import MoE
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import MOE_LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec, Layer
from shardline.planner.models.parts.sparse import PlannedGQA

_LAYER_KEYS: Mapping[str, str] = {**MOE_LAYER_KEYS, "attention.sinks": "self_attn.attention_sink"}
_DEFAULTS = Defaults(
    vocab=152576, hidden=4096, intermediate=16384, layers=48, heads=64, kv_heads=4, head_dim=192, positions=262144
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layers for multi-token prediction are left out."""
    llama = llama_like(hf, max_model_len, _DEFAULTS, norm=Norm("rms", 1e-5), eps_key="layernorm_epsilon", partial=True)
    dims, dense = llama.dims, llama.dense
    full = PlannedGQA(**asdict(llama.attention)).changed(
        sinks=hf.flag("add_full_attention_sink_bias", False),
        value_size=hf.integer("v_head_dim", 128),
    )
    windowed = full.changed(
        num_heads=hf.integer("swa_num_attention_heads", dims.num_heads),
        num_kv_heads=hf.integer("swa_num_key_value_heads", dims.num_kv_heads),
        head_dim=hf.integer("swa_head_dim", dims.head_dim),
        window=hf.integer("sliding_window", 128),
        sinks=hf.flag("add_swa_attention_sink_bias", True),
        value_size=hf.integer("swa_v_head_dim", 128),
    )
    routing = group_routing(hf, num_experts=256, chosen=8, scale=1.0)
    moe = MoE(routing, replace(dense, intermediate_size=hf.integer("moe_intermediate_size", 2048)))

    @cache
    def layer(has_window: bool, sparse: bool) -> Layer:
        return llama.layer(windowed if has_window else full, moe if sparse else dense)

    windows = layer_flags(hf, "hybrid_layer_pattern", dims.num_layers)
    return llama.spec(map(layer, windows, layer_flags(hf, "moe_layer_freq", dims.num_layers)))


tensor_source = checkpoint_keys(_LAYER_KEYS)
