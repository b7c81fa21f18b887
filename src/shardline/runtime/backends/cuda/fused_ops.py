"""Products of few rows that include the ops before and after them in a layer, since launches dominate a decode step.

Each gives the same bits as the ops that it replaces; these are its oracle. For many rows, one op after another is
faster, because every tile of 64 rows repeats work that costs more than a launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.models.spec import Rope
from shardline.runtime.backends.cuda.gpu_kernels import CudaKernels
from shardline.runtime.backends.cuda.kernels import linear as products
from shardline.runtime.backends.cuda.kernels import qkv_linear as qkv_kernel
from shardline.runtime.backends.cuda.rows import AddedRows, HeadNorms, UnnormedRows

FEW_ROWS = 64
"""The most rows that these products take: those of one tile."""


def add_linear(kernels: CudaKernels, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> AddedRows:
    """residual [M, N] + the linear of x [M, K] with `weight` [N, K], rounded again after the addition. It comes with
    the sums of squares from which the next norm starts."""
    out = kernels.activation_empty(residual.dtype, *residual.shape)
    runs = products.runs_of_row(len(x), residual.shape[1], x.dtype)
    square_sums = kernels.activation_empty(torch.float32, len(x), runs)
    products.add_linear(x, weight, bias, residual, out, square_sums)
    return AddedRows(out, square_sums)


def unnormed_linear(
    kernels: CudaKernels,
    x: UnnormedRows,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The linear of the norm of x [M, K], gated if `gate` names an activation: [M, N] of `out_dtype` (default: x's
    dtype)."""
    width = len(weight) // (1 if gate is None else 2)
    out = kernels.activation_empty(out_dtype or x.dtype, len(x.rows), width)
    products.linear(x, weight, bias, out, gate)
    return out


def fits_tile(head_dim: int, rope: Rope | None) -> bool:
    """Whether `qkv_linear` can normalise such heads. A tile then holds one head, and sums its squares in the order of a
    norm."""
    if rope is None or not 32 <= head_dim <= 128 or head_dim.bit_count() > 1:
        return False  # wider heads would need more memory than a multiprocessor has
    return rope.interleaved or 2 * len(rope.inv_freq) == head_dim


def qkv_linear(
    kernels: CudaKernels,
    x: Tensor | UnnormedRows,
    weight: Tensor,
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
    """The linear, then `rms_norm` of query and key heads if they have norms, then `rope_and_write_kv`. Returns the
    queries [M, num_heads, D]. The caches hold elements of x's dtype. All heads have the same D, which is even."""
    head_dim, num_rows = key_cache.shape[3], len(slots)
    query = kernels.activation_empty(x.dtype, num_rows, num_heads, head_dim)
    head_norms = (None, None, 0.0, 0.0) if norms is None else norms
    qkv_kernel.qkv_linear(
        x, weight, bias, query, key_cache, value_cache, slots, positions, table, interleaved, *head_norms
    )
    return query
