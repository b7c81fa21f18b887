"""Rows of an embedding table, on the GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def embedding(table: Tensor, ids: Tensor, out: Tensor) -> None:
    """out [T, H] = table [V, H] at ids [T]; an id outside the table (another rank's) leaves zeros."""
    num_tokens, width = out.shape
    if num_tokens > 0:
        grid = (num_tokens, triton.cdiv(width, _BLOCK))
        _embedding_kernel[grid](table, ids, out, table.shape[0], width, BLOCK=_BLOCK)


@triton.jit
def _embedding_kernel(table_ptr, ids_ptr, out_ptr, num_rows, width, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    held = (row >= 0) & (row < num_rows) & (column < width)
    values = tl.load(table_ptr + row * width + column, mask=held, other=0.0)
    tl.store(out_ptr + token * width + column, values, mask=column < width)
