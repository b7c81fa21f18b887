"""Mamba-2 behind a short causal convolution (Dao and Gu, arXiv 2405.21060), as in Nemotron-H."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.runtime.ops.attention.sequence_states import SequenceRows, SequenceStates


class MambaInputs(NamedTuple):
    """What is projected of tokens; rows may be strided."""

    qkv: Tensor
    """[T, channels]: queries (C) and keys (B) of all groups, then values (x) of all heads."""
    gate: Tensor
    """[T, heads * head dim]"""
    step: Tensor
    """[T, heads]"""


class MambaWeights(NamedTuple):
    """Weights; float32, but the norm's, which has the activations' dtype."""

    conv: Tensor
    """[channels, taps]; the last tap is that of the token itself."""
    conv_bias: Tensor | None
    """[channels]"""
    decay_log: Tensor
    """[heads]"""
    step_offset: Tensor
    """[heads]"""
    skip: Tensor
    """[heads]"""
    norm: Tensor
    """[heads * head dim]"""


def mamba(
    kernels: Kernels, x: MambaInputs, weights: MambaWeights, states: SequenceStates, rows: SequenceRows, eps: float
) -> Tensor:
    """[T, heads * head dim], and the states of the sequences advance.

    Queries, keys and values are silu(conv(qkv)). A head has a state S [key dim, head dim] of its own, and shares query
    and key with the other heads of its group. For each token in turn, with t = softplus(step + step_offset):

        S = exp(-exp(decay_log) t) S + key (t value),   out = norm((query S + skip value) silu(gate)).

    The norm is over all heads of a group. All of it is in float32, and rounded once.
    """
    out = kernels.activation_empty(x.qkv.dtype, *x.gate.shape)
    conv, bias, decay_log, step_offset, skip, norm = weights
    kernels.mamba(*x, conv, bias, decay_log, step_offset, skip, norm, *states, *rows, out, eps)
    return out


def mamba_reference(x: MambaInputs, weights: MambaWeights, key_dim: int, num_groups: int, eps: float) -> Tensor:
    """`mamba` in fp64, for one sequence from its first token on."""
    qkv, gate, step = (part.double() for part in x)
    conv, decay_log, offset, skip, norm = (part.double() for part in (weights.conv, *weights[2:]))
    bias = None if weights.conv_bias is None else weights.conv_bias.double()
    heads = step.shape[1]
    padded = F.pad(qkv.T[None], (conv.shape[1] - 1, 0))
    mixed = F.silu(F.conv1d(padded, conv[:, None], bias, groups=len(conv)))[0].T
    keys = num_groups * key_dim
    query, key, value = torch.split(mixed, [keys, keys, mixed.shape[1] - 2 * keys], dim=1)
    query, key = (
        part.view(len(qkv), num_groups, key_dim).repeat_interleave(heads // num_groups, 1) for part in (query, key)
    )
    value, size = value.view(len(qkv), heads, -1), F.softplus(step + offset)
    kept = torch.exp(-decay_log.exp() * size)
    state, outputs = qkv.new_zeros(heads, key_dim, value.shape[2]), []
    for t in range(len(qkv)):
        state = kept[t, :, None, None] * state + key[t, :, :, None] * (size[t, :, None] * value[t])[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", query[t], state) + skip[:, None] * value[t])
    gated = (torch.stack(outputs).flatten(1) * F.silu(gate)).view(len(qkv), num_groups, -1)
    normed = gated / torch.sqrt(gated.pow(2).mean(2, keepdim=True) + eps)
    return (normed.flatten(1) * norm).to(x.qkv.dtype)
