"""The GPU kernels that a model needs, as data: one case for each kernel and each size on which its code depends.

`kernels/cuda/proof.py` has a trial for each kind of case. What no case names is not used on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shardline.deployment.deployment import Deployment
from shardline.deployment.gpu_support import lacking_kernels
from shardline.models.attention import GQA
from shardline.models.feed_forward import Dense, MoE
from shardline.models.mla import MLA
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec, Layer
from shardline.weights.base import PLAIN

Size = int | float | str | bool | None


class KernelCase(msgspec.Struct, frozen=True):
    """Something to prove."""

    kernel: str
    """The kind of case, which names its kernels for people too."""
    dtype: str
    """That of activations."""
    sizes: dict[str, Size] = {}

    @property
    def shape(self) -> str:
        """The sizes for people."""
        return ", ".join(f"{name} {value}" for name, value in self.sizes.items() if value not in (None, False, ""))


def kernel_cases(deployment: Deployment) -> tuple[KernelCase, ...]:
    """The cases of a deployment's model, each once, the quick ones first; none of kernels that lack a part of it."""
    lacks = lacking_kernels(deployment.spec)
    found = [
        KernelCase(kernel, deployment.dtype, sizes)
        for kernel, sizes in (*_sampling_cases(deployment.spec), *_layer_cases(deployment))
        if kernel not in lacks
    ]
    keyed = {msgspec.msgpack.encode(case): case for case in found}
    return tuple(keyed.values())


_Cases = Iterator[tuple[str, dict[str, Size]]]


def _sampling_cases(spec: DecoderSpec) -> _Cases:
    vocabulary: dict[str, Size] = {"vocabulary": spec.vocab_size}
    for kernel in ("greedy_argmax", "sample", "penalize", "mask_tokens", "logprobs", "row_digests"):
        yield kernel, vocabulary
    if spec.logits_softcap is not None:
        yield "softcap", {**vocabulary, "cap": spec.logits_softcap}


def _layer_cases(deployment: Deployment) -> _Cases:
    spec, hidden = deployment.spec, deployment.spec.hidden_size
    products = deployment.weight_format.open_format().gpu_cases
    quantized = "linear_int8" in products
    yield "add", {"width": hidden}
    depths = {hidden}
    for layer in dict.fromkeys(spec.layers):
        norms = (layer.attention_norm, layer.feed_forward_norm, layer.post_attention_norm, layer.post_feed_forward_norm)
        for norm in norms:
            yield from _norm_cases(norm, hidden, quantized=quantized)
        depths |= {shape[1] for _, shape in layer.parameters(hidden, num_experts=1) if len(shape) == 2}
        if isinstance(layer.attention, GQA):
            yield from _gqa_cases(layer.attention, deployment)
        elif isinstance(layer.attention, MLA):
            yield from _mla_cases(layer.attention, deployment)
        yield from _feed_forward_cases(layer, deployment)
        if (given := layer.token_input) is not None:
            yield "activation", {"activation": given.activation, "gated": True}
            for width in (given.size, hidden):
                yield from _norm_cases(given.norm, width)
    yield from _norm_cases(spec.final_norm, hidden, quantized=quantized)
    for depth in sorted(depths):
        yield "linear", {"depth": depth, "gate": ""}
        for kernel in products:
            yield kernel, {"depth": depth, "gate": "", "group": deployment.weight_format.group_size or None}
        if quantized:
            yield "quantize_rows", {"width": depth}


def _norm_cases(norm: Norm | None, width: int, *, quantized: bool = False) -> _Cases:
    if norm is not None:
        sizes: dict[str, Size] = {"width": width, "eps": norm.eps, "quantized": quantized}
        if norm.kind == "rms":
            yield "rms_norm", {**sizes, "offset": norm.kernel_offset}
        else:
            yield "layer_norm", {**sizes, "bias": norm.bias}


def _gqa_cases(attention: GQA, deployment: Deployment) -> _Cases:
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    kv: dict[str, Size] = {"kv_heads": 2 if kv_heads > 1 else 1, "dim": dim, "kv": _stored(deployment)}
    kv |= {"block": deployment.cache.block_size}
    norms = attention.norms
    for width in (heads * dim, kv_heads * dim) if norms.norms_all_heads else (dim,):
        yield from _norm_cases(norms.qk_norm, width)
    for norm in (norms.rotated_norm, norms.value_norm):
        yield from _norm_cases(norm, dim)
    yield "write_kv", kv
    rope = attention.positions.rope
    if rope is not None:
        yield "rope", {**kv, "rotary": 2 * len(rope.inv_freq), "interleaved": rope.interleaved}
    yield (
        "attention",
        {**kv, "group": heads // kv_heads, "window": attention.window, "softcap": attention.score.softcap},
    )


def _mla_cases(attention: MLA, deployment: Deployment) -> _Cases:
    own = attention.projections
    rope = attention.positions.rope
    yield from _norm_cases(own.kv_norm, own.kv_lora_rank)
    if own.q_lora_rank is not None:
        yield from _norm_cases(own.q_norm, own.q_lora_rank)
    if rope is not None:
        yield "rotate", {"dim": own.query_head_dim, "rotary": own.rope_head_dim, "interleaved": rope.interleaved}
    for depth, columns in ((own.nope_head_dim, own.kv_lora_rank), (own.kv_lora_rank, own.value_head_dim)):
        yield "linear_heads", {"depth": depth, "columns": columns}
    sizes: dict[str, Size] = {"rank": own.kv_lora_rank, "rotary": own.rope_head_dim, "kv": _stored(deployment)}
    yield "mla", {**sizes, "block": deployment.cache.block_size}


def _feed_forward_cases(layer: Layer, deployment: Deployment) -> _Cases:
    block, hidden = layer.feed_forward, deployment.spec.hidden_size
    dense = block if isinstance(block, Dense) else block.shared
    if dense is not None:
        yield from _dense_cases(dense, deployment)
    if isinstance(block, MoE):
        yield from _norm_cases(block.own_norms, hidden)
        routing, held = block.routing, deployment.weight_format
        yield (
            "route",
            {
                "experts": routing.num_experts,
                "chosen": routing.experts_per_token,
                "sigmoid": routing.scoring == "sigmoid",
                "normalized": routing.normalized,
                "groups": routing.num_groups,
                "top_groups": routing.top_groups,
                "top2_sum": routing.group_score == "top2_sum",
                "bias": routing.correction_bias,
            },
        )
        yield (
            "experts",
            {
                "depth": hidden,
                "inner": block.expert.intermediate_size,
                "activation": block.expert.activation,
                "gated": block.expert.gated,
                "held": PLAIN.name if held.open_format().reads_packed else held.name,
            },
        )


def _dense_cases(dense: Dense, deployment: Deployment) -> _Cases:
    yield "activation", {"activation": dense.activation, "gated": dense.gated}
    if dense.gated:
        format = deployment.weight_format.open_format()
        for kernel in ("linear", *(() if format.reads_packed else format.gpu_cases)):
            yield kernel, {"depth": deployment.spec.hidden_size, "gate": dense.activation}


def _stored(deployment: Deployment) -> str:
    """The dtype of keys and values, if it is another one than that of activations."""
    return "" if deployment.cache.dtype == deployment.dtype else deployment.cache.dtype
