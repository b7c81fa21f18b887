"""DeepSeek V3.2: V3 with an indexer that chooses the tokens to attend to."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from msgspec.structs import asdict, replace

from shardline.models.families import deepseek_v3
from shardline.models.hf_config import HFConfig
from shardline.models.parameters import parse_name
from shardline.models.spec import DecoderSpec, Layer, TensorSource
from shardline.planner.models.parts.sparse import Indexer, SparseMLA

_KEYS: Mapping[str, str] = {
    "attention.indexer_q": "self_attn.indexer.wq_b",
    "attention.indexer_k": "self_attn.indexer.wk",
    "attention.indexer_weights": "self_attn.indexer.weights_proj",
    "attention.indexer_norm": "self_attn.indexer.k_norm",
}


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    indexer = Indexer(
        hf.integer("index_n_heads", 64), hf.integer("index_head_dim", 128), hf.integer("index_topk", 2048)
    )
    dense = deepseek_v3.decoder_spec(hf, max_model_len)

    @cache
    def sparse(layer: Layer) -> Layer:
        return replace(layer, attention=SparseMLA(**asdict(layer.attention), indexer=indexer))

    return replace(dense, layers=tuple(map(sparse, dense.layers)))


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    layer, part, kind = parse_name(name)
    if part in _KEYS:
        return TensorSource(f"model.layers.{layer}.{_KEYS[part]}.{kind}")
    return deepseek_v3.tensor_source(name, spec)
