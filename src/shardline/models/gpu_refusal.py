"""Parts of models that only the CPU's kernels compute."""

from __future__ import annotations

from collections.abc import Iterator

from shardline.models.attention import GQA, MLA
from shardline.models.feed_forward import Dense, MoE
from shardline.models.spec import DecoderSpec, Layer


def gpu_refusal(spec: DecoderSpec) -> str:
    """Why GPUs cannot run a model, in one line; empty: they can."""
    missing = list(dict.fromkeys(part for layer in dict.fromkeys(spec.layers) for part in _missing(layer)))
    if spec.final_norm.rounds_once:
        missing.append("norm that rounds once")  # the fused layers round the quotient first
    if spec.logits_scale != 1.0:
        missing.append("scaled logits")
    if not missing:
        return ""
    return f"{spec.model_type} runs on CPUs only: the GPU kernels have no {', no '.join(missing)}"


def _missing(layer: Layer) -> Iterator[str]:
    attention, feed_forward = layer.attention, layer.feed_forward
    if isinstance(attention, GQA):
        if attention.sinks:
            yield "attention sinks"
        if attention.chunked:
            yield "attention in chunks"
        if attention.norms_all_heads:
            yield "norm over all heads"
        if attention.rotated_norm is not None:
            yield "norm after rope"
        if attention.kv_source is not None:
            yield "layers that read the cache of another layer"
        if attention.value_is_key or attention.value_norm is not None:
            yield "values made of keys"
    if isinstance(attention, GQA | MLA) and attention.query_scale is not None:
        yield "scale of queries by position"
    if isinstance(feed_forward, MoE):
        if feed_forward.expert.bias:
            yield "biases of experts"
        if feed_forward.routing.logits_bias:
            yield "bias of a router's logits"
        if feed_forward.own_norms is not None:
            yield "experts beside a dense block"
        if feed_forward.routing.scales_input:
            yield "scale of experts' inputs"
    dense = feed_forward if isinstance(feed_forward, Dense) else feed_forward.expert
    if dense.activation == "clamped_swish":
        yield "clamped gate"
    if layer.parallel:
        yield "parallel blocks"
    elif layer.attention_norm is None or layer.feed_forward_norm is None:
        yield "blocks without a norm before them"
    if layer.token_input is not None:
        yield "layers with inputs of their own for each token"
    if layer.residual_scale != 1.0 or layer.output_scale:
        yield "scale of the residual stream"
