"""The places of canonical parameters in a GGUF file. The names of tensors are the same for all model types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shardline.models.parameters import Shape, expert_of, parse_name
from shardline.models.spec import GQA, MLA, DecoderSpec, Dense, MoE

_MODEL_KEYS: Mapping[str, str] = {
    "embed": "token_embd",
    "positions": "position_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    "token_input_norm": "per_layer_proj_norm",
}
_LAYER_KEYS: Mapping[str, str] = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.q_down": "attn_q_a",
    "attention.q_up": "attn_q_b",
    "attention.kv_down": "attn_kv_a_mqa",
    "attention.kv_norm": "attn_kv_a_norm",
    "attention.kv_up": "attn_kv_b",
    "post_attention_norm": "post_attention_norm",
    "feed_forward_norm": "ffn_norm",
    "post_feed_forward_norm": "post_ffw_norm",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.shared.gate": "ffn_gate_shexp",
    "feed_forward.shared.up": "ffn_up_shexp",
    "feed_forward.shared.down": "ffn_down_shexp",
    "feed_forward.shared_gate": "ffn_gate_inp_shexp",
    "feed_forward.experts_norm": "pre_ffw_norm_2",
    "feed_forward.experts_output_norm": "post_ffw_norm_2",
    "feed_forward.shared_output_norm": "post_ffw_norm_1",
    "token_input.gate": "inp_gate",
    "token_input.down": "proj",
    "token_input.norm": "post_norm",
}
_WHOLE_KEYS: Mapping[str, str] = {
    "attention.sinks": "attn_sinks.weight",
    "feed_forward.router_logits": "ffn_gate_inp.bias",
    "feed_forward.router_norm": "ffn_gate_inp.scale",
    "feed_forward.expert_scale": "ffn_down_exps.scale",
    "output_scale": "layer_output_scale.weight",
}
"""Parts whose tensors end in another way than other weights and biases."""
_LATENT_Q_NORM = "attn_q_a_norm"
_SHARED = "feed_forward.shared."


class Place(NamedTuple):
    """A place where a parameter may be: rows of a tensor whose dims before the last are flattened."""

    key: str
    shape: Shape
    """Shape of the whole tensor, without dims of size 1."""
    first_row: int
    first_column: int = 0
    """The parameter's first column."""
    row_columns: int = 0
    """Columns of the tensor; 0: as many as the parameter has."""


def possible_places(name: str, shape: Shape, spec: DecoderSpec) -> Iterator[Place]:
    """The places where the canonical parameter `name` of `shape` may be, the usual one first."""
    layer, part, kind = parse_name(name)
    if layer is None:
        yield Place(f"{_MODEL_KEYS[part]}.{kind}", _squeezed(shape), 0)
        return
    expert = expert_of(part)
    if expert is not None:
        moe = spec.layers[layer].feed_forward
        assert isinstance(moe, MoE), f"{name} belongs to an expert"
        own = part.rpartition(".")[2]
        yield from _expert_places(layer, own, kind, shape, expert, moe.routing.num_experts)
        return
    prefix = f"blk.{layer}."
    if part in _WHOLE_KEYS:
        yield Place(f"{prefix}{_WHOLE_KEYS[part]}", _squeezed(shape), 0)
        return
    if part in ("token_input.embed", "token_input.projection"):
        yield _token_input_place(layer, part, shape, len(spec.layers))
        return
    if part == "feed_forward.router" and kind == "bias":
        yield Place(f"{prefix}exp_probs_b.bias", shape, 0)
    if part == "attention.q_norm" and isinstance(spec.layers[layer].attention, MLA):
        yield Place(f"{prefix}{_LATENT_Q_NORM}.{kind}", shape, 0)
        return
    if part in _LAYER_KEYS:
        yield Place(f"{prefix}{_LAYER_KEYS[part]}.{kind}", _squeezed(shape), 0)
    if part.startswith(_SHARED):
        # Where every layer has a dense block beside its experts, the file names it like one.
        yield Place(f"{prefix}ffn_{part.removeprefix(_SHARED)}.{kind}", _squeezed(shape), 0)
    if part == "feed_forward_norm" and spec.layers[layer].post_attention_norm is None:
        # Some files name this norm by the block that it follows, others by the one that it precedes.
        yield Place(f"{prefix}post_attention_norm.{kind}", _squeezed(shape), 0)
    yield from _fused_places(prefix, part, kind, shape, spec.layers[layer].attention, spec.layers[layer].feed_forward)


def _token_input_place(layer: int, part: str, shape: Shape, num_layers: int) -> Place:
    """The place of what a layer reads of each token, in a tensor that holds it for all layers."""
    rows, columns = shape
    if part == "token_input.embed":
        width = num_layers * columns
        return Place("per_layer_token_embd.weight", (rows, width), 0, layer * columns, width)
    return Place("per_layer_model_proj.weight", (num_layers * rows, columns), layer * rows)


def _fused_places(
    prefix: str, part: str, kind: str, shape: Shape, attention: object, feed_forward: object
) -> Iterator[Place]:
    """Places in tensors that hold q, k and v, or gate and up, one after another."""
    if isinstance(attention, GQA) and part in ("attention.q", "attention.k", "attention.v"):
        q_size, kv_size = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        first = {"attention.q": 0, "attention.k": q_size, "attention.v": q_size + kv_size}[part]
        yield Place(f"{prefix}attn_qkv.{kind}", (q_size + 2 * kv_size, *shape[1:]), first)
    if isinstance(feed_forward, Dense) and feed_forward.gated and part in ("feed_forward.gate", "feed_forward.up"):
        first = 0 if part == "feed_forward.gate" else shape[0]
        yield Place(f"{prefix}ffn_up.{kind}", (2 * shape[0], *shape[1:]), first)


def _expert_places(layer: int, part: str, kind: str, shape: Shape, expert: int, num_experts: int) -> Iterator[Place]:
    prefix, rows = f"blk.{layer}.ffn_", shape[0]
    yield Place(f"{prefix}{part}_exps.{kind}", _squeezed((num_experts, *shape)), expert * rows)
    if part in ("gate", "up"):
        first = (2 * expert + (part == "up")) * rows
        yield Place(f"{prefix}gate_up_exps.{kind}", _squeezed((num_experts, 2 * rows, *shape[1:])), first)
    # Files of the first mixtures have a tensor for each expert.
    yield Place(f"{prefix}{part}.{expert}.{kind}", _squeezed(shape), 0)


def _squeezed(shape: Shape) -> Shape:
    """The shape without dims of size 1: files leave some of them out."""
    return tuple(size for size in shape if size != 1)
