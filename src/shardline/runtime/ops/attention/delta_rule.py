"""The gated delta rule behind a short causal convolution (Yang et al., arXiv 2412.06464), as in Qwen3.5."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.runtime.ops.attention.sequence_states import SequenceRows, SequenceStates

_KEY_EPS = 1e-6
"""Of the lengths of keys and queries. It is fixed in the models' own code."""


class DeltaInputs(NamedTuple):
    """What is projected of tokens; rows may be strided."""

    qkv: Tensor
    """[T, channels]: queries and keys of all key heads, then values of all value heads."""
    gate: Tensor
    """[T, value heads * value dim]"""
    beta: Tensor
    """[T, value heads]"""
    decay: Tensor
    """[T, value heads]"""


class DeltaWeights(NamedTuple):
    """Weights of the rule; float32, but the norm's, which has the activations' dtype."""

    conv: Tensor
    """[channels, taps]; the last tap is that of the token itself."""
    decay_log: Tensor
    """[value heads]"""
    decay_offset: Tensor
    """[value heads]"""
    norm: Tensor
    """[value dim]"""


def delta_rule(
    kernels: Kernels, x: DeltaInputs, weights: DeltaWeights, states: SequenceStates, rows: SequenceRows, eps: float
) -> Tensor:
    """[T, value heads * value dim], and the states of the sequences advance.

    Queries, keys and values are silu(conv(qkv)). Keys get length 1, and queries key_dim^-1/2. A value head has a state
    S of its own, and shares the key head with its neighbours. For each token in turn, with d = exp(-exp(decay_log)
    softplus(decay + decay_offset)):

        S = d S + key (sigmoid(beta) (value - key d S)),   out = norm(query S) silu(gate).

    All of it is in float32, and rounded once.
    """
    out = kernels.activation_empty(x.qkv.dtype, *x.gate.shape)
    kernels.delta_rule(*x, *weights, *states, *rows, out, eps)
    return out


def delta_rule_reference(x: DeltaInputs, weights: DeltaWeights, head_dims: tuple[int, int], eps: float) -> Tensor:
    """`delta_rule` in fp64, for one sequence from its first token on. `head_dims`: of keys and of values."""
    qkv, gate, beta, decay = (part.double() for part in x)
    conv, decay_log, decay_offset, norm = (part.double() for part in weights)
    (key_dim, value_dim), heads = head_dims, beta.shape[1]
    padded = F.pad(qkv.T[None], (conv.shape[1] - 1, 0))
    mixed = F.silu(F.conv1d(padded, conv[:, None], groups=len(conv)))[0].T
    keys = (mixed.shape[1] - heads * value_dim) // 2
    query, key, value = torch.split(mixed, [keys, keys, heads * value_dim], dim=1)
    query, key = (part.view(len(qkv), -1, key_dim) for part in (query, key))
    query, key = (part / torch.sqrt(part.pow(2).sum(2, keepdim=True) + _KEY_EPS) for part in (query, key))
    query, key = (part.repeat_interleave(heads * key_dim // keys, 1) for part in (query * key_dim**-0.5, key))
    value = value.view(len(qkv), heads, value_dim)
    kept, rate = torch.exp(-decay_log.exp() * F.softplus(decay + decay_offset)), torch.sigmoid(beta)
    state, outputs = qkv.new_zeros(heads, key_dim, value_dim), []
    for t in range(len(qkv)):
        state = state * kept[t, :, None, None]
        change = rate[t, :, None] * (value[t] - torch.einsum("hk,hkv->hv", key[t], state))
        state = state + key[t, :, :, None] * change[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", query[t], state))
    out = torch.stack(outputs)
    out = out / torch.sqrt(out.pow(2).mean(2, keepdim=True) + eps) * norm
    return (out.flatten(1) * F.silu(gate)).to(x.qkv.dtype)
