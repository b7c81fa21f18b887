"""Gemma 2: Gemma with soft-caps, four norms a layer, and a window in every other layer."""

from __future__ import annotations

from msgspec.structs import replace

from shardline.models.config_fields import Defaults, full_every
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import FOUR_NORM_LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec

_DEFAULTS = Defaults(
    vocab=256000, hidden=2304, intermediate=9216, layers=26, heads=8, kv_heads=4, head_dim=256, positions=8192
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf.only("use_bidirectional_attention", False)
    llama = llama_like(
        hf,
        max_model_len,
        _DEFAULTS,
        norm=Norm("rms", 1e-6, weight_offset=1.0),
        activation="gelu_pytorch_tanh",
        activation_key="hidden_activation",
    )
    gqa = llama.biased(
        scale=hf.number("query_pre_attn_scalar", 256) ** -0.5,
        softcap=hf.optional_number("attn_logit_softcapping", 50.0),
    )
    layers = llama.by_window(
        lambda window: llama.four_norm_layer(gqa.changed(window=window)),
        hf.optional_integer("sliding_window", 4096),
        full_every(2, llama.dims.num_layers),
    )
    return replace(
        llama.spec(layers, tied=True),
        embedding_scale=llama.dims.hidden_size**0.5,
        logits_softcap=hf.optional_number("final_logit_softcapping", 30.0),
    )


tensor_source = checkpoint_keys(FOUR_NORM_LAYER_KEYS)
