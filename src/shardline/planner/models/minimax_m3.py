"""MiniMax-M3: an indexer chooses blocks of tokens in most layers; dense first layers, experts with a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from msgspec.structs import asdict, replace

from shardline.models.config_fields import Defaults, layer_flags, read_routing
from shardline.models.feed_forward import Dense, MoE
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import MIXTRAL_LAYER_KEYS, llama_like, llama_source
from shardline.models.parameters import parse_name
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec, Layer, TensorSource
from shardline.planner.models.parts.sparse import PlannedGQA, PlannedIndexer

_LAYER_KEYS: Mapping[str, str] = {
    **MIXTRAL_LAYER_KEYS,
    "feed_forward.shared.gate": "block_sparse_moe.shared_experts.gate_proj",
    "feed_forward.shared.up": "block_sparse_moe.shared_experts.up_proj",
    "feed_forward.shared.down": "block_sparse_moe.shared_experts.down_proj",
}
_DEFAULTS = Defaults(
    vocab=200064, hidden=6144, intermediate=3072, layers=60, heads=64, kv_heads=4, head_dim=128, positions=1048576
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layers for multi-token prediction are left out.

    The configuration does not say how the indexer's keys are cached. They are counted as in DeepSeek-V3.2.
    """
    norm = Norm("rms", 1e-6, weight_offset=float(hf.flag("use_gemma_norm", False)))
    # hidden_act names the clamped gate, which no other family has.
    llama = llama_like(hf.with_values(hidden_act="silu"), max_model_len, _DEFAULTS, norm=norm, theta=5e6, partial=True)
    dims, norm = llama.dims, llama.norm
    full = PlannedGQA(**asdict(llama.attention)).changed(
        qk_norm=norm if hf.flag("use_qk_norm", True) else None,
        output_gate=hf.flag("attention_output_gate", False),
    )
    sparse = hf.section("sparse_attention_config")
    indexer = PlannedIndexer(
        sparse.integer("sparse_num_index_heads", 4),
        sparse.integer("sparse_index_dim", 128),
        sparse.integer("sparse_topk_blocks", 16) * sparse.integer("sparse_block_size", 128),
    )
    dense = Dense(hf.integer("dense_intermediate_size", 12288), "clamped_swish")
    routing = replace(
        read_routing(hf, num_experts=128, experts_per_token=4, normalized=True),
        scoring="sigmoid",
        scale=hf.number("routed_scaling_factor", 1.0),
        correction_bias=hf.flag("use_routing_bias", True),
    )
    shared_size = hf.integer("n_shared_experts", 1, minimum=0) * hf.integer("shared_intermediate_size", 3072)
    shared = replace(dense, intermediate_size=shared_size) if shared_size else None
    moe = MoE(routing, replace(dense, intermediate_size=hf.integer("moe_intermediate_size", 3072)), shared)
    chooses = layer_flags(sparse, "sparse_attention_freq", dims.num_layers)

    @cache
    def layer(is_sparse: bool, has_experts: bool) -> Layer:
        return llama.layer(full.changed(indexer=indexer) if is_sparse else full, moe if has_experts else dense)

    return llama.spec(map(layer, chooses, layer_flags(hf, "moe_layer_freq", dims.num_layers)))


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    layer, part, kind = parse_name(name)
    if part.startswith("attention.indexer"):
        return TensorSource(f"model.layers.{layer}.self_attn.{part.removeprefix('attention.')}.{kind}")
    return llama_source(name, _LAYER_KEYS)
