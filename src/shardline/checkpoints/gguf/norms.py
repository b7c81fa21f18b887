"""Norms whose stored weights already include the number that the model adds to them: Gemma's w + 1."""

from __future__ import annotations

from msgspec.structs import replace

from shardline.models.spec import GQA, DecoderSpec, Layer, Norm

NORMS_HOLD_OFFSET = "norms_hold_offset"
"""Key of a configuration that was made from a GGUF file. True: see above."""


def without_norm_offsets(spec: DecoderSpec) -> DecoderSpec:
    """The model with norms that add nothing to their weights. Equal layers stay one object."""
    changed = {id(layer): _layer(layer) for layer in spec.layers}
    layers = tuple(changed[id(layer)] for layer in spec.layers)
    return replace(spec, layers=layers, final_norm=_norm(spec.final_norm))


def _layer(layer: Layer) -> Layer:
    attention = layer.attention
    if isinstance(attention, GQA) and attention.qk_norm is not None:
        attention = replace(attention, qk_norm=_norm(attention.qk_norm))
    return replace(
        layer,
        attention=attention,
        attention_norm=_optional(layer.attention_norm),
        feed_forward_norm=_optional(layer.feed_forward_norm),
        post_attention_norm=_optional(layer.post_attention_norm),
        post_feed_forward_norm=_optional(layer.post_feed_forward_norm),
    )


def _optional(norm: Norm | None) -> Norm | None:
    return None if norm is None else _norm(norm)


def _norm(norm: Norm) -> Norm:
    return replace(norm, weight_offset=0.0)
