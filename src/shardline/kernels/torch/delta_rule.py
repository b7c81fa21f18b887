"""The gated delta rule, see `runtime.ops.attention.delta_rule`: all sequences of a step advance together, token by
token. Functions are those on which exact numerics rest, see `elementwise`."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.torch.elementwise import sigmoid

_KEY_EPS = 1e-6


def delta_rule(
    qkv: Tensor,
    gate: Tensor,
    beta: Tensor,
    decay: Tensor,
    conv: Tensor,
    decay_log: Tensor,
    decay_offset: Tensor,
    norm: Tensor,
    state: Tensor,
    recent: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    rows: Tensor,
    out: Tensor,
    eps: float,
) -> None:
    starts, device = query_starts.tolist(), qkv.device
    counts = [stop - start for start, stop in itertools.pairwise(starts)]
    # The longest first, so that those that have a token left are always the first ones.
    order = sorted((index for index, count in enumerate(counts) if count), key=lambda index: -counts[index])
    if not order:
        return
    own = torch.tensor(order, device=device)
    places = rows.index_select(0, own).long()
    lens = torch.tensor([counts[index] for index in order], device=device)
    is_new = context_lens.index_select(0, own) == lens
    firsts = torch.tensor([starts[index] for index in order], device=device)
    before = recent.index_select(0, places).masked_fill_(is_new[:, None, None], 0)
    mixed, recent_now = _convolve(qkv, before, conv, firsts, lens)
    recent.index_copy_(0, places, recent_now)

    heads, key_dim, value_dim = state.shape[1:]
    keys = (qkv.shape[1] - heads * value_dim) // 2
    query, key, value = torch.split(mixed, [keys, keys, heads * value_dim], dim=1)
    # Of length 1, the query times key_dim^-1/2.
    query, key = (F.rms_norm(part.reshape(-1, key_dim), (key_dim,), eps=_KEY_EPS / key_dim) for part in (query, key))
    query, key = (
        part.view(len(qkv), -1, key_dim).repeat_interleave(heads * key_dim // keys, 1)
        for part in (query / key_dim, key / key_dim**0.5)
    )
    value = value.reshape(len(qkv), heads, value_dim)
    kept = torch.exp(-(torch.exp(decay_log) * _softplus(decay.float() + decay_offset)))
    rate = sigmoid(beta.float())
    current = state.index_select(0, places).masked_fill_(is_new[:, None, None, None], 0)
    outputs = qkv.new_empty(len(qkv), heads, value_dim, dtype=torch.float32)
    for step in range(counts[order[0]]):
        active = sum(counts[index] > step for index in order)
        tokens = firsts[:active] + step
        kept_now, rate_now = (part.index_select(0, tokens)[:, :, None] for part in (kept, rate))
        query_now, key_now = (part.index_select(0, tokens)[..., None] for part in (query, key))
        held = current[:active] * kept_now[..., None]
        change = rate_now * (value.index_select(0, tokens) - (key_now * held).sum(2))
        held = held + key_now * change[:, :, None]
        outputs.index_copy_(0, tokens, (query_now * held).sum(2))
        current[:active] = held
    state.index_copy_(0, places, current)
    normed = F.rms_norm(outputs.view(-1, value_dim), (value_dim,), eps=eps).view(outputs.shape) * norm.float()
    own_gate = gate.float()
    out.copy_(normed.flatten(1) * (own_gate * sigmoid(own_gate)))


def gate_heads(x: Tensor, gate: Tensor) -> None:
    """Multiplies x [T, H, D] by the sigmoid of its gates, which is rounded before, in place."""
    x.mul_(sigmoid(gate.float()).to(x.dtype))


def _convolve(qkv: Tensor, before: Tensor, conv: Tensor, firsts: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    """silu(conv(qkv)) [T, channels] float32, and what the convolution sees of the last tokens [S, taps - 1, channels].

    `before`: the same before this step. `firsts`, `lens` [S]: the sequences' rows.
    """
    taps, num_before = conv.shape[1], before.shape[1]
    seen = torch.cat([before.flatten(0, 1), qkv])
    sequence = torch.repeat_interleave(torch.arange(len(lens), device=qkv.device), lens)
    own = torch.arange(len(sequence), device=qkv.device) - (lens.cumsum(0) - lens)[sequence]

    def place(sequence: Tensor, offset: Tensor) -> Tensor:
        """Where in `seen` the input lies that is `offset` tokens behind a sequence's first new one."""
        old = sequence * num_before + num_before + offset
        return torch.where(offset < 0, old, before.shape[0] * num_before + firsts[sequence] + offset)

    total = qkv.new_zeros(len(sequence), qkv.shape[1], dtype=torch.float32)
    for tap in range(taps):
        total += seen.index_select(0, place(sequence, own - (taps - 1 - tap))).float() * conv[:, tap]
    mixed = torch.zeros_like(total).index_copy_(0, firsts[sequence] + own, total * sigmoid(total))
    ends = torch.arange(num_before, device=qkv.device) - num_before + lens[:, None]
    everyone = torch.arange(len(lens), device=qkv.device)[:, None].expand(ends.shape)
    return mixed, seen.index_select(0, place(everyone, ends).flatten()).view(before.shape)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)); log(1 + e) is 2 artanh(e / (2 + e))."""
    e = torch.exp(-x.abs())
    s = e / (2 + e)
    square, series = s * s, torch.full_like(s, 1 / 13)
    for divisor in (11, 9, 7, 5, 3):
        series = series * square + 1 / divisor
    return x.clamp(min=0) + 2 * (s * square * series + s)
