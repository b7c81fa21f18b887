"""DeepSeek-V4: see `parts/compressed.py` for its attention and its residual streams. All layers have experts.

Counted like this, Flash has 284.3 billion parameters: 277.0 in experts, 1.1 in shared ones, 4.6 in the projections of
attention, 0.5 in compressors and indexers, 1.1 in embedding and lm_head. Pro has 1,573: 1,547.4, 4.0, 18.3, 1.2, 1.9.
A token uses 13.3 and 48.8 of them, without the embedding. The publisher states 284 and 1,600, and 13 and 49; the layer
for multi-token prediction, which is left out here, has 6.6 and 25.9. Left out too are the tables by which the first
layers choose experts by token ids. Scores are square roots of softplus, not sigmoids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from msgspec.structs import replace

from shardline.models.config_fields import Defaults, Dims, read_activation, read_dims
from shardline.models.deepseek_like import shared_experts
from shardline.models.feed_forward import Dense, MoE, Routing
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import decoder
from shardline.models.parameters import expert_of, parse_name
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec, TensorSource
from shardline.planner.models.parts.compressed import OVERLAPPING, CompressedMQA, StreamedLayer
from shardline.planner.models.parts.sparse import PlannedIndexer

_MODEL_KEYS = {"embed": "embed", "final_norm": "norm", "lm_head": "head", "head_streams": "hc_head"}
_LAYER_KEYS: Mapping[str, str] = {
    "attention_norm": "attn_norm",
    "attention_streams": "hc_attn",
    "attention.q_down": "attn.wq_a",
    "attention.q_norm": "attn.q_norm",
    "attention.q_up": "attn.wq_b",
    "attention.kv_down": "attn.wkv",
    "attention.kv_norm": "attn.kv_norm",
    "attention.sinks": "attn.attn_sink",
    "attention.compressor_kv": "attn.compressor.wkv",
    "attention.compressor_gate": "attn.compressor.wgate",
    "attention.compressor_position": "attn.compressor.ape",
    "attention.compressor_norm": "attn.compressor.norm",
    "attention.indexer_compressor_kv": "attn.indexer.compressor.wkv",
    "attention.indexer_compressor_gate": "attn.indexer.compressor.wgate",
    "attention.indexer_compressor_position": "attn.indexer.compressor.ape",
    "attention.indexer_compressor_norm": "attn.indexer.compressor.norm",
    "attention.indexer_q": "attn.indexer.wq_b",
    "attention.indexer_weights": "attn.indexer.weights_proj",
    "attention.o_down": "attn.wo_a",
    "attention.o": "attn.wo_b",
    "feed_forward_norm": "ffn_norm",
    "feed_forward_streams": "hc_ffn",
    "feed_forward.router": "ffn.gate",
    "feed_forward.shared.gate": "ffn.shared_experts.w1",
    "feed_forward.shared.up": "ffn.shared_experts.w3",
    "feed_forward.shared.down": "ffn.shared_experts.w2",
}
_DEFAULTS = Defaults(
    vocab=129280, hidden=4096, intermediate=2048, layers=43, heads=64, kv_heads=1, head_dim=512, positions=1048576
)
_EXPERT_KEYS: Mapping[str, str] = {"gate": "w1", "up": "w3", "down": "w2"}


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    dims = read_dims(hf, _DEFAULTS)
    hf.only("num_key_value_heads", 1)
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-6))
    moe, num_hashed = _experts(hf), hf.integer("num_hash_layers", 3, minimum=0)
    hashed = replace(moe, routing=replace(moe.routing, correction_bias=False))
    streams = hf.integer("hc_mult", 4)

    @cache
    def layer(ratio: int, by_hash: bool) -> StreamedLayer:
        experts = hashed if by_hash else moe
        return StreamedLayer(_attention(hf, dims, ratio), experts, norm, norm, streams=streams)

    hashes = [index < num_hashed for index in range(dims.num_layers)]
    layers = map(layer, _ratios(hf, dims.num_layers), hashes)
    return decoder(hf.with_values(model_type="deepseek_v4"), dims, norm, layers)


def _ratios(hf: HFConfig, num_layers: int) -> Sequence[int]:
    """The ratio of each layer. The list also has those of the layers for multi-token prediction."""
    ratios = hf.values.get("compress_ratios")
    if not isinstance(ratios, Sequence) or len(ratios) < num_layers:
        raise hf.error("compress_ratios", f"must have a number for each of {num_layers} layers, got {ratios!r:.80}")
    if unknown := [ratio for ratio in ratios if not isinstance(ratio, int) or ratio < 0]:
        raise hf.error("compress_ratios", f"has {unknown[0]!r}; a ratio is a number of tokens, or 0")
    return ratios[:num_layers]


def _attention(hf: HFConfig, dims: Dims, ratio: int) -> CompressedMQA:
    groups = hf.integer("o_groups", 8)
    if dims.num_heads % groups:
        raise hf.error("o_groups", f"must divide num_attention_heads ({dims.num_heads}), got {groups}")
    indexer = PlannedIndexer(
        hf.integer("index_n_heads", 64), hf.integer("index_head_dim", 128), hf.integer("index_topk", 512)
    )
    return CompressedMQA(
        num_heads=dims.num_heads,
        head_dim=dims.head_dim,
        query_rank=hf.integer("q_lora_rank", 1024),
        rotated_size=hf.integer("qk_rope_head_dim", 64),
        output_groups=groups,
        output_rank=hf.integer("o_lora_rank", 1024),
        ratio=ratio,
        recent=hf.integer("sliding_window", 128),
        indexer=indexer if ratio == OVERLAPPING else None,
    )


def _experts(hf: HFConfig) -> MoE:
    routing = Routing(
        hf.integer("n_routed_experts", 256),
        hf.integer("num_experts_per_tok", 6),
        scoring="sigmoid",
        normalized=hf.flag("norm_topk_prob", True),
        scale=hf.number("routed_scaling_factor", 1.0),
        correction_bias=True,
    )
    expert = Dense(hf.integer("moe_intermediate_size", 2048), read_activation(hf, "hidden_act", "silu"))
    return MoE(routing, expert, shared_experts(expert, hf.integer("n_shared_experts", 1, minimum=0)))


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`. Hyper-connections stand for three tensors."""
    layer, part, kind = parse_name(name)
    if layer is None:
        return TensorSource(f"{_MODEL_KEYS[part]}.{kind}")
    if (expert := expert_of(part)) is not None:
        return TensorSource(f"layers.{layer}.ffn.experts.{expert}.{_EXPERT_KEYS[part.rpartition('.')[2]]}.{kind}")
    return TensorSource(f"layers.{layer}.{_LAYER_KEYS[part]}.{kind}")
