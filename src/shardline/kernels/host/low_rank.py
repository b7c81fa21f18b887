"""The CPU's kernels of adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline import _cpu
from shardline.kernels.low_rank import RANK_BLOCK, LowRankWeights

_ROW_WORDS = 7
"""Words that the kernel needs for each row to sort rows by adapter."""


def low_rank_empty(
    num_slots: int, max_rank: int, in_features: int, widths: tuple[int, ...], dtype: torch.dtype
) -> LowRankWeights:
    step = 2 if dtype == torch.bfloat16 else 1
    return LowRankWeights.empty(num_slots, max_rank, in_features, widths, dtype, step=step)


def low_rank(x: Tensor, slots: Tensor, weights: LowRankWeights, bias: Tensor | None, scaled: bool) -> Tensor:
    out = _cpu.activation_empty(torch.float32, len(x), *[2] * scaled, weights.up.shape[2])
    _cpu.low_rank(x, slots, *_parts(weights), bias, *_scratch(len(x), weights), out)
    return out


def expert_low_rank(
    x: Tensor,
    ids: Tensor,
    first_expert: int,
    num_experts: int,
    compact: bool,
    sorted: bool,
    adapters: Tensor,
    weights: LowRankWeights,
    bias: Tensor | None,
    scaled: bool,
) -> Tensor:
    out = _cpu.activation_empty(torch.float32, ids.numel(), 1 + scaled, weights.up.shape[2])
    chosen = ids, first_expert, num_experts, compact, sorted, adapters
    _cpu.expert_low_rank(x, *chosen, *_parts(weights), bias, *_scratch(ids.numel(), weights), out)
    return out


def _parts(weights: LowRankWeights) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the kernels take them."""
    numbers = weights.ranks, weights.scales, weights.factors, weights.scaled, weights.bounds
    return weights.down, weights.up, *numbers


def _scratch(num_rows: int, weights: LowRankWeights) -> tuple[Tensor, Tensor]:
    """Memory for the products with `down`, and for the order of rows."""
    hidden = _cpu.activation_empty(torch.float32, num_rows, weights.down.shape[1] * RANK_BLOCK)
    return hidden, _cpu.activation_empty(torch.int32, len(weights.ranks) + num_rows * _ROW_WORDS)
