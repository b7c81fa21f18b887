"""Ministral 3: Mistral whose queries grow with their position."""

from __future__ import annotations

from shardline.models.config_fields import Defaults
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(
    vocab=131072, hidden=4096, intermediate=14336, layers=34, heads=32, kv_heads=8, head_dim=128, positions=262144
)
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    if not hf.has("rope_scaling") and not hf.has("rope_parameters"):
        hf = hf.with_values(rope_parameters=DEFAULT_ROPE)
    llama = llama_like(hf, max_model_len, _DEFAULTS, norm=Norm("rms", 1e-5))
    window = hf.optional_integer("sliding_window", None)
    return llama.spec(llama.layer(llama.attention.changed(window=window, query_scale=llama.rope.query_scale())))


tensor_source = checkpoint_keys(LAYER_KEYS)
