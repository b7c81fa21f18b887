"""Products of few rows on a GPU that do what lies before and after them in a layer: a decode step is short of launches.

Each has the bits of the ops that it stands for, which are its oracle. Many rows take those, one after another: what a
tile repeats for its 64 rows costs them more than a launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardline import _cpu
from shardline.models.spec import Rope
from shardline.runtime.ops.activation import ActivationName
from shardline.runtime.ops.dispatch import kernels
from shardline.runtime.ops.linear import PackedWeight
from shardline.runtime.ops.linear_input import LinearInput, UnnormedRows, as_tensor

FEW_ROWS = 64
"""Rows of one tile."""


class AddedRows(NamedTuple):
    """What `add_linear` gives."""

    rows: Tensor
    """[M, N]"""
    square_sums: Tensor
    """See UnnormedRows."""


def are_few_on_gpu(x: LinearInput) -> bool:
    """Whether these products are for rows x."""
    if isinstance(x, UnnormedRows):
        return True
    return isinstance(x, Tensor) and len(x) <= FEW_ROWS and kernels(x) is not _cpu


def add_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, residual: Tensor) -> AddedRows:
    """residual [M, N] + `linear`(x [M, K]), rounded once more, with the sums of squares that its norm begins with."""
    from shardline.runtime.ops import triton as on_gpu

    on = kernels(x)
    out = on.activation_empty(residual.dtype, *residual.shape)
    runs = on_gpu.runs_of_row(len(x), residual.shape[1], x.dtype)
    square_sums = on.activation_empty(torch.float32, len(x), runs)
    on_gpu.add_linear(x, weight.panels, bias, residual, out, square_sums)
    return AddedRows(out, square_sums)


def unnormed_linear(
    x: UnnormedRows,
    weight: PackedWeight,
    bias: Tensor | None,
    *,
    gate: ActivationName | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear` of the norm of x [M, K], or with `gate` `gated_linear`: [M, N] of `out_dtype` (default: x's)."""
    from shardline.runtime.ops import triton as on_gpu

    width = weight.out_features // (1 if gate is None else 2)
    out = kernels(x.rows).activation_empty(out_dtype or x.dtype, len(x.rows), width)
    on_gpu.linear(x, weight.panels, bias, out, gate)
    return out


class HeadNorms(NamedTuple):
    """RMS norms of queries and keys before their rotation."""

    query: Tensor
    """[D], and so is the key's."""
    key: Tensor
    eps: float
    weight_offset: float


def fits_a_tile(head_dim: int, rope: Rope | None) -> bool:
    """Whether `qkv_linear` can norm such heads: a tile then has one, and their squares in the order of a norm."""
    if rope is None or not 32 <= head_dim <= 128 or head_dim.bit_count() > 1:
        return False  # wider ones would need more memory than a multiprocessor has
    return rope.interleaved or 2 * len(rope.inv_freq) == head_dim


def qkv_linear(
    x: LinearInput,
    weight: PackedWeight,
    bias: Tensor | None,
    num_heads: int,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: Tensor,
    *,
    interleaved: bool,
    norms: HeadNorms | None,
) -> Tensor:
    """`linear`, then `rms_norm` of query and key heads if they have norms, then `rope_and_write_kv`: the queries
    [M, num_heads, D]. The caches hold elements of x's dtype; all heads have D, an even number."""
    from shardline.runtime.ops import triton as on_gpu

    rows = x if isinstance(x, UnnormedRows) else as_tensor(x)
    head_dim, num_rows = key_cache.shape[3], len(slots)
    query = kernels(slots).activation_empty(rows.dtype, num_rows, num_heads, head_dim)
    head_norms = (None, None, 0.0, 0.0) if norms is None else norms
    on_gpu.qkv_linear(
        rows, weight.panels, bias, query, key_cache, value_cache, slots, positions, table, interleaved, *head_norms
    )
    return query
