"""Command R7B and Command A: one LayerNorm feeds attention and feed-forward, and rope is only in windowed layers."""

from __future__ import annotations

from msgspec.structs import replace

from shardline.models.config_fields import Defaults, divided, full_every
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import LAYER_KEYS, checkpoint_keys, llama_like
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec, Layer

_DEFAULTS = Defaults(vocab=256000, hidden=8192, intermediate=22528, layers=40, heads=64, positions=8192)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    heads = hf.integer("num_attention_heads", _DEFAULTS.heads)
    head_dim = divided(hf, "hidden_size", hf.integer("hidden_size", _DEFAULTS.hidden), heads)
    hf.only("use_qk_norm", False)
    llama = llama_like(
        hf.with_values(head_dim=head_dim),
        max_model_len,
        _DEFAULTS,
        norm=Norm("layer", 1e-5),
        eps_key="layer_norm_eps",
        interleaved=True,
    )
    gqa = llama.biased()

    def layer(window: int | None) -> Layer:
        own = gqa.changed(rope=None) if window is None else gqa.changed(window=window)
        return Layer(own, llama.dense, llama.norm, None, parallel=True)

    types = full_every(hf.integer("sliding_window_pattern", 4), llama.dims.num_layers)
    layers = llama.by_window(layer, hf.optional_integer("sliding_window", 4096), types)
    return replace(llama.spec(layers, tied=True), logits_scale=hf.number("logit_scale", 0.0625))


tensor_source = checkpoint_keys(LAYER_KEYS)
