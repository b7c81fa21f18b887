"""MiMo: Qwen2 with a layer for multi-token prediction, which is a head of its own."""

from __future__ import annotations

from shardline.models.families import qwen2
from shardline.models.heads import HeadLayout
from shardline.models.hf_config import HFConfig
from shardline.models.spec import DecoderSpec


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    return qwen2.decoder_spec(hf.with_values(model_type="qwen2"), max_model_len)


tensor_source = qwen2.tensor_source

PREDICTOR = HeadLayout(
    layers="model.mtp_layers.0.",
    others={
        "head_input.token_norm": "model.mtp_layers.0.token_layernorm",
        "head_input.hidden_norm": "model.mtp_layers.0.hidden_layernorm",
        "head_input.projection": "model.mtp_layers.0.input_proj",
        "final_norm": "model.mtp_layers.0.final_layernorm",
    },
    hidden_first=True,
    returns_normed=True,
)
"""See `heads.LAYER_LAYOUT`."""
