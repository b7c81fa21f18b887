"""GLM-5: latent attention to the tokens that an indexer chooses; in GLM-5.2, some layers share a choice."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.models.config_fields import Defaults
from shardline.models.deepseek_like import SPARSE_LAYER_KEYS, deepseek_like, group_routing, with_indexer
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import checkpoint_keys
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(vocab=154880, hidden=6144, intermediate=12288, layers=78, heads=64, positions=202752)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layer for multi-token prediction is left out."""
    hf.only("rope_interleave", True)
    dense = deepseek_like(
        hf.with_values(
            defaults={"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5}
        ),
        max_model_len,
        _DEFAULTS,
        group_routing(hf, num_experts=256, chosen=8, scale=2.5),
        first_dense=3,
        expert_size=2048,
        num_shared=1,
        interleaved=True,
    )
    kinds = hf.values.get("indexer_types") or _kinds(hf, len(dense.layers))
    return with_indexer(hf, dense, num_heads=32, interleaved=hf.flag("indexer_rope_interleave", True), kinds=kinds)


def _kinds(hf: HFConfig, num_layers: int) -> Sequence[str]:
    """See `with_indexer`. As transformers has them if the configuration does not list them."""
    if pattern := hf.values.get("index_topk_pattern"):
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    period, offset = hf.integer("index_topk_freq", 1), hf.integer("index_skip_topk_offset", 2)
    return ["shared" if max(index - offset + 1, 0) % period else "full" for index in range(num_layers)]


tensor_source = checkpoint_keys(SPARSE_LAYER_KEYS)
