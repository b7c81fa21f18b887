"""A DecoderSpec executed the plainest way: one sequence, dense masks, float32, no cache; none of the runtime's code."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.models.spec import GQA, MLA, Attention, DecoderSpec, Dense, Norm, Rope

Weights = Mapping[str, Tensor]


def forward(spec: DecoderSpec, weights: Weights, token_ids: Tensor) -> Tensor:
    """Logits [num_tokens, vocab_size] of one sequence of `token_ids` [num_tokens]."""
    positions = torch.arange(len(token_ids))
    hidden = weights["embed.weight"][token_ids] * spec.embedding_scale
    if spec.learned_positions is not None:
        hidden = hidden + weights["positions.weight"][positions]
    for index, layer in enumerate(spec.layers):
        own = _below(weights, f"layers.{index}.")
        update = _attention(layer.attention, own, _norm(layer.attention_norm, own, "attention_norm", hidden), positions)
        if layer.post_attention_norm is not None:
            update = _norm(layer.post_attention_norm, own, "post_attention_norm", update)
        hidden = hidden + update
        update = _feed_forward(
            layer.feed_forward, own, _norm(layer.feed_forward_norm, own, "feed_forward_norm", hidden)
        )
        if layer.post_feed_forward_norm is not None:
            update = _norm(layer.post_feed_forward_norm, own, "post_feed_forward_norm", update)
        hidden = hidden + update
    hidden = _norm(spec.final_norm, weights, "final_norm", hidden)
    logits = hidden @ weights["embed.weight" if spec.tied_embeddings else "lm_head.weight"].T
    if spec.lm_head_bias:
        logits = logits + weights["lm_head.bias"]
    return logits if spec.logits_softcap is None else _softcap(logits, spec.logits_softcap)


def _attention(attention: Attention, weights: Weights, hidden: Tensor, positions: Tensor) -> Tensor:
    attend = _latent_attention if isinstance(attention, MLA) else _grouped_attention
    return attend(attention, weights, hidden, positions)  # type: ignore[arg-type]


def _latent_attention(mla: MLA, weights: Weights, hidden: Tensor, positions: Tensor) -> Tensor:
    """The expanded form: every head gets keys and values of its own out of the latent."""
    num_tokens = len(hidden)
    if mla.q_norm is None:
        q = _linear(weights, "attention.q", hidden)
    else:
        q_latent = _norm(mla.q_norm, weights, "attention.q_norm", _linear(weights, "attention.q_down", hidden))
        q = _linear(weights, "attention.q_up", q_latent)
    q_nope, q_rope = q.view(num_tokens, mla.num_heads, -1).split([mla.nope_head_dim, mla.rope_head_dim], dim=-1)
    down = _linear(weights, "attention.kv_down", hidden)
    latent = _norm(mla.kv_norm, weights, "attention.kv_norm", down[:, : mla.kv_lora_rank])
    k_rope = _rotate(mla.rope, down[:, None, mla.kv_lora_rank :], positions).expand(-1, mla.num_heads, -1)
    up = _linear(weights, "attention.kv_up", latent).view(num_tokens, mla.num_heads, -1)
    k_nope, v = up.split([mla.nope_head_dim, mla.value_head_dim], dim=-1)
    q = torch.cat([q_nope, _rotate(mla.rope, q_rope, positions)], -1).transpose(0, 1)
    k = torch.cat([k_nope, k_rope], -1).transpose(0, 1)
    scores = (q @ k.transpose(1, 2) * mla.scale).masked_fill(positions[:, None] < positions, -math.inf)
    heads = scores.softmax(-1) @ v.transpose(0, 1)
    return _linear(weights, "attention.o", heads.transpose(0, 1).flatten(1))


def _grouped_attention(gqa: GQA, weights: Weights, hidden: Tensor, positions: Tensor) -> Tensor:
    num_tokens = len(hidden)
    q = _linear(weights, "attention.q", hidden).view(num_tokens, gqa.num_heads, gqa.head_dim)
    k = _linear(weights, "attention.k", hidden).view(num_tokens, gqa.num_kv_heads, gqa.head_dim)
    v = _linear(weights, "attention.v", hidden).view(num_tokens, gqa.num_kv_heads, gqa.head_dim)
    if gqa.qk_norm is not None:
        q = _norm(gqa.qk_norm, weights, "attention.q_norm", q)
        k = _norm(gqa.qk_norm, weights, "attention.k_norm", k)
    if gqa.rope is not None:
        q, k = _rotate(gqa.rope, q, positions), _rotate(gqa.rope, k, positions)
    distance = positions[:, None] - positions[None, :]
    visible = distance >= 0
    if gqa.window is not None:
        visible &= distance < gqa.window
    heads = []
    for head in range(gqa.num_heads):
        kv_head = head // (gqa.num_heads // gqa.num_kv_heads)
        scores = q[:, head] @ k[:, kv_head].T * gqa.scale
        if gqa.softcap is not None:
            scores = _softcap(scores, gqa.softcap)
        heads.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v[:, kv_head])
    return _linear(weights, "attention.o", torch.cat(heads, -1))


def _rotate(rope: Rope, x: Tensor, positions: Tensor) -> Tensor:
    """`x` [num_tokens, heads, head_dim] rotated by complex multiplication."""
    half = len(rope.inv_freq)
    angles = positions[:, None].float() * torch.tensor(rope.inv_freq)
    turn = torch.polar(torch.full_like(angles, rope.attention_scaling), angles)[:, None]
    if rope.interleaved:
        pairs = torch.complex(x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]) * turn
        rotated = torch.view_as_real(pairs).flatten(-2)
    else:
        pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        rotated = torch.cat([pairs.real, pairs.imag], -1)
    return torch.cat([rotated, x[..., 2 * half :]], -1)


def _feed_forward(dense: Dense, weights: Weights, hidden: Tensor) -> Tensor:
    activations: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
    }
    act = activations[dense.activation]
    up = _linear(weights, "feed_forward.up", hidden)
    inner = act(_linear(weights, "feed_forward.gate", hidden)) * up if dense.gated else act(up)
    return _linear(weights, "feed_forward.down", inner)


def _norm(norm: Norm, weights: Weights, name: str, x: Tensor) -> Tensor:
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * (weights[f"{name}.weight"] + norm.weight_offset)
    return y + weights[f"{name}.bias"] if norm.bias else y


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _softcap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def _below(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
