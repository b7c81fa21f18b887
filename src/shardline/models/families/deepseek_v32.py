"""DeepSeek V3.2: V3 with an indexer that chooses the tokens to attend to."""

from __future__ import annotations

from shardline.models.deepseek_like import SPARSE_LAYER_KEYS, with_indexer
from shardline.models.families import deepseek_v3
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import checkpoint_keys
from shardline.models.spec import DecoderSpec


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layer for multi-token prediction is left out."""
    dense = deepseek_v3.decoder_spec(hf.with_values(defaults={"max_position_embeddings": 163840}), max_model_len)
    return with_indexer(hf, dense, num_heads=64, interleaved=False, kinds=["full"] * len(dense.layers))


tensor_source = checkpoint_keys(SPARSE_LAYER_KEYS)
