"""The largest output of a product, without writing the others: what a greedy token needs of the lm_head."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.ops.dispatch import kernels
from shardline.runtime.ops.linear import PackedWeight, linear
from shardline.runtime.ops.linear_int8 import Int8Weight, linear_int8
from shardline.runtime.ops.quantize_rows import QuantizedRows
from shardline.runtime.ops.sampling import greedy_argmax
from shardline.runtime.ops.storage import activation_empty


def linear_argmax(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """[M, 2] float32: the largest fp32 output of `linear` per row, beside the bits of its column as int32.

    The lowest column on ties; NaN loses to everything else. On the CPU each panel of the weight gives its best output
    while it is at hand; elsewhere, and as an oracle, it is `best_of` the outputs.
    """
    if kernels(x) is not _cpu:
        return best_of(linear(x, weight, bias, out_dtype=torch.float32))
    best = activation_empty(x.shape[0], 2, len(weight.panels), dtype=torch.float32)
    _cpu.linear_best(x, weight.panels, bias, weight.out_features, best)
    return _chosen(best)


def linear_int8_argmax(x: QuantizedRows, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """`linear_argmax` of the outputs of `linear_int8`."""
    if kernels(x.values) is not _cpu:
        return best_of(linear_int8(x, weight, bias))
    best = activation_empty(x.values.shape[0], 2, len(weight.panels), dtype=torch.float32)
    rows = (x.values, x.scales, x.sums, x.in_features)
    _cpu.linear_int8_best(*rows, weight.panels, weight.scales, bias, weight.out_features, best)
    return _chosen(best)


def best_of(logits: Tensor) -> Tensor:
    """What `linear_argmax` returns, for logits [M, N] fp32 that are there already."""
    ids, values = greedy_argmax(logits)
    return torch.stack([values, ids.to(torch.int32).view(torch.float32)], dim=1)


def _chosen(best: Tensor) -> Tensor:
    pairs = activation_empty(best.shape[0], 2, dtype=torch.float32)
    _cpu.choose_best(best, pairs)
    return pairs
