"""Phi 3 and 4: Llama with q, k and v in one tensor, and gate and up in another. Rope may rotate only a part of a head,
and may be a long rope."""

from __future__ import annotations

from shardline.models.config_fields import Defaults, read_dims
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(vocab=32064, hidden=3072, intermediate=8192, layers=32, heads=32, positions=4096)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf.only("attention_bias", False)
    dims = read_dims(hf, _DEFAULTS)
    rope = read_rope(
        hf,
        dims.head_dim,
        dims.max_position_embeddings,
        partial=True,
        aliases={"su": "longrope", "yarn": "longrope"},
        default_original=4096,
    )
    llama = llama_like(hf, max_model_len, _DEFAULTS, norm=Norm("rms", 1e-5), rope=rope)
    return llama.spec(llama.layer(llama.attention.changed(window=hf.optional_integer("sliding_window", None))))


tensor_source = checkpoint_keys(
    LAYER_KEYS,
    fused={
        "self_attn.qkv_proj": ("attention.q", "attention.k", "attention.v"),
        "mlp.gate_up_proj": ("feed_forward.gate", "feed_forward.up"),
    },
)
