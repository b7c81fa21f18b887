"""The gated delta rule, Mamba-2 and gated heads, see `runtime.ops.attention`: all sequences of a step advance together,
token by token. Functions are those on which exact numerics rest, see `elementwise`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

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
    sequences = _order(query_starts, context_lens, rows)
    if sequences is None:
        return
    query, key, value = _heads(_convolve(qkv, recent, conv, None, sequences), state)
    key_dim, value_dim = state.shape[2:]
    # Of length 1, the query times key_dim^-1/2.
    query, key = (F.rms_norm(part.contiguous(), (key_dim,), eps=_KEY_EPS / key_dim) for part in (query, key))
    query, key = query / key_dim, key / key_dim**0.5
    kept = torch.exp(-(torch.exp(decay_log) * _softplus(decay.float() + decay_offset)))
    rate = sigmoid(beta.float())

    def change(tokens: Tensor, key: Tensor, held: Tensor) -> Tensor:
        seen = (key[..., None] * held).sum(2)
        return rate.index_select(0, tokens)[..., None] * (value.index_select(0, tokens) - seen)

    outputs = _advance(query, key, kept, change, state, sequences)
    normed = F.rms_norm(outputs.view(-1, value_dim), (value_dim,), eps=eps).view(outputs.shape) * norm.float()
    out.copy_(normed.flatten(1) * _silu(gate.float()))


def mamba(
    qkv: Tensor,
    gate: Tensor,
    step: Tensor,
    conv: Tensor,
    conv_bias: Tensor | None,
    decay_log: Tensor,
    step_offset: Tensor,
    skip: Tensor,
    norm: Tensor,
    state: Tensor,
    recent: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    rows: Tensor,
    out: Tensor,
    eps: float,
) -> None:
    sequences = _order(query_starts, context_lens, rows)
    if sequences is None:
        return
    heads, key_dim, value_dim = state.shape[1:]
    query, key, value = _heads(_convolve(qkv, recent, conv, conv_bias, sequences), state)
    size = _softplus(step.float() + step_offset)
    kept = torch.exp(-(torch.exp(decay_log) * size))

    def change(tokens: Tensor, key: Tensor, held: Tensor) -> Tensor:
        return size.index_select(0, tokens)[..., None] * value.index_select(0, tokens)

    outputs = _advance(query, key, kept, change, state, sequences) + value * skip[:, None]
    gated = outputs.flatten(1) * _silu(gate.float())
    num_keys = (qkv.shape[1] - heads * value_dim) // (2 * key_dim)
    width = heads * value_dim // num_keys
    normed = F.rms_norm(gated.view(-1, width), (width,), eps=eps).view(gated.shape)
    out.copy_(normed * norm.float())


def gate_heads(x: Tensor, gate: Tensor) -> None:
    """Multiplies x [T, H, D] by the sigmoid of its gates, which is rounded before, in place."""
    x.mul_(sigmoid(gate.float()).to(x.dtype))


class _Sequences(NamedTuple):
    """The sequences of a step that have tokens, the longest first: those that have a token left are the first ones."""

    places: Tensor
    """[S]: the rows of their states."""
    is_new: Tensor
    """[S]: whether all of their tokens are."""
    firsts: Tensor
    """[S]: their first rows."""
    lens: Tensor
    """[S]: their numbers of rows."""
    counts: list[int]
    """`lens` on the host."""


def _order(query_starts: Tensor, context_lens: Tensor, rows: Tensor) -> _Sequences | None:
    starts, device = query_starts.tolist(), query_starts.device
    counts = [stop - start for start, stop in itertools.pairwise(starts)]
    order = sorted((index for index, count in enumerate(counts) if count), key=lambda index: -counts[index])
    if not order:
        return None
    own = torch.tensor(order, device=device)
    lens = torch.tensor([counts[index] for index in order], device=device)
    firsts = torch.tensor([starts[index] for index in order], device=device)
    is_new = context_lens.index_select(0, own) == lens
    return _Sequences(rows.index_select(0, own).long(), is_new, firsts, lens, [counts[index] for index in order])


def _convolve(qkv: Tensor, recent: Tensor, conv: Tensor, bias: Tensor | None, sequences: _Sequences) -> Tensor:
    """silu(conv(qkv)) [T, channels] float32; `recent` becomes what the convolution sees of the last tokens."""
    taps, (firsts, lens) = conv.shape[1], (sequences.firsts, sequences.lens)
    before = recent.index_select(0, sequences.places).masked_fill_(sequences.is_new[:, None, None], 0)
    num_before = before.shape[1]
    seen = torch.cat([before.flatten(0, 1), qkv])
    sequence = torch.repeat_interleave(torch.arange(len(lens), device=qkv.device), lens)
    own = torch.arange(len(sequence), device=qkv.device) - (lens.cumsum(0) - lens)[sequence]

    def place(sequence: Tensor, offset: Tensor) -> Tensor:
        """Where in `seen` the input lies that is `offset` tokens behind a sequence's first new one."""
        old = sequence * num_before + num_before + offset
        return torch.where(offset < 0, old, len(before) * num_before + firsts[sequence] + offset)

    total = qkv.new_zeros(len(sequence), qkv.shape[1], dtype=torch.float32)
    if bias is not None:
        total += bias
    for tap in range(taps):
        total += seen.index_select(0, place(sequence, own - (taps - 1 - tap))).float() * conv[:, tap]
    ends = torch.arange(num_before, device=qkv.device) - num_before + lens[:, None]
    everyone = torch.arange(len(lens), device=qkv.device)[:, None].expand(ends.shape)
    now = seen.index_select(0, place(everyone, ends).flatten()).view(before.shape)
    recent.index_copy_(0, sequences.places, now)
    return torch.zeros_like(total).index_copy_(0, firsts[sequence] + own, _silu(total))


def _heads(mixed: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [T, value heads, key dim], and values [T, value heads, value dim]."""
    heads, key_dim, value_dim = state.shape[1:]
    keys = (mixed.shape[1] - heads * value_dim) // 2
    query, key, value = torch.split(mixed, [keys, keys, heads * value_dim], dim=1)
    query, key = (
        part.reshape(len(mixed), -1, key_dim).repeat_interleave(heads * key_dim // keys, 1) for part in (query, key)
    )
    return query, key, value.reshape(len(mixed), heads, value_dim)


def _advance(
    query: Tensor,
    key: Tensor,
    kept: Tensor,
    change: Callable[[Tensor, Tensor, Tensor], Tensor],
    state: Tensor,
    sequences: _Sequences,
) -> Tensor:
    """The outputs [T, value heads, value dim], for what remains of a state, `kept` [T, value heads], and `change` (some
    tokens, their keys, what remains of their states), which is added along their keys."""
    current = state.index_select(0, sequences.places).masked_fill_(sequences.is_new[:, None, None, None], 0)
    outputs = query.new_empty(*query.shape[:2], state.shape[3])
    for step in range(sequences.counts[0]):
        active = sum(count > step for count in sequences.counts)
        tokens = sequences.firsts[:active] + step
        query_now, key_now = query.index_select(0, tokens), key.index_select(0, tokens)
        held = current[:active] * kept.index_select(0, tokens)[:, :, None, None]
        held = held + key_now[..., None] * change(tokens, key_now, held)[:, :, None]
        outputs.index_copy_(0, tokens, (query_now[..., None] * held).sum(2))
        current[:active] = held
    state.index_copy_(0, sequences.places, current)
    return outputs


def _silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)); log(1 + e) is 2 artanh(e / (2 + e))."""
    e = torch.exp(-x.abs())
    s = e / (2 + e)
    square, series = s * s, torch.full_like(s, 1 / 13)
    for divisor in (11, 9, 7, 5, 3):
        series = series * square + 1 / divisor
    return x.clamp(min=0) + 2 * (s * square * series + s)
