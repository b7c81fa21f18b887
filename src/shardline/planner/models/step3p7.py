"""Step 3.7: windowed and full attention with norms of q and k, dense first layers, experts with a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from msgspec.structs import replace

from shardline.models.config_fields import Defaults, layer_windows, read_routing
from shardline.models.feed_forward import MoE
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import MOE_LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec, Layer

_LAYER_KEYS: Mapping[str, str] = {
    **MOE_LAYER_KEYS,
    "feed_forward.router": "moe.gate",
    "feed_forward.experts.*.gate": "moe.gate_proj",
    "feed_forward.experts.*.up": "moe.up_proj",
    "feed_forward.experts.*.down": "moe.down_proj",
    "feed_forward.shared.gate": "share_expert.gate_proj",
    "feed_forward.shared.up": "share_expert.up_proj",
    "feed_forward.shared.down": "share_expert.down_proj",
}
_DEFAULTS = Defaults(
    vocab=128896, hidden=4096, intermediate=11264, layers=45, heads=64, kv_heads=8, head_dim=128, positions=65536
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layers for multi-token prediction are left out."""
    llama = llama_like(hf, max_model_len, _DEFAULTS, norm=Norm("rms", 1e-5))
    dims, dense = llama.dims, llama.dense
    routing = replace(
        read_routing(hf, num_experts=288, experts_per_token=8, normalized=True),
        scoring="sigmoid",
        scale=hf.number("moe_router_scaling_factor", 1.0),
        correction_bias=hf.flag("use_moe_router_bias", True),
    )
    expert = replace(dense, intermediate_size=hf.integer("moe_intermediate_size", 1280))
    moe = MoE(routing, expert, replace(dense, intermediate_size=hf.integer("share_expert_dim", 1280)))
    num_dense = hf.integer("first_k_dense_replace", 3, minimum=0)
    windows = layer_windows(
        hf, dims.num_layers, hf.optional_integer("sliding_window", 512), ["full_attention"] * dims.num_layers
    )

    @cache
    def layer(window: int | None, is_dense: bool) -> Layer:
        gqa = llama.attention.changed(window=window, qk_norm=llama.norm)
        return llama.layer(gqa, dense if is_dense else moe)

    return llama.spec(map(layer, windows, [index < num_dense for index in range(dims.num_layers)]))


tensor_source = checkpoint_keys(_LAYER_KEYS)
