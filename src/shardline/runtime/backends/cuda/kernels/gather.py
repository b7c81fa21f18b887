"""Both halves of a gather over memory that GPUs of one host read from each other.

A rank puts its rows in its own buffer; all pass a barrier; each collects the parts of all. Buffers have two halves, in
turn: whoever writes a half again has passed the barrier of the other one since, which a peer enters only when it has
collected. Which half it is, the GPU counts itself, as a captured step may have an odd number of gathers: `turns` [2]
int32 are a copy of how often was put, which only `collect_columns` writes, and that number, which only `put_columns`
writes: neither changes what it reads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def put_columns(local: Tensor, buffer: Tensor, turns: Tensor) -> None:
    """local [M, N], rows may be strided, to the half of buffer [2, elements] whose turn it is."""
    rows, width = local.shape
    blocks = triton.cdiv(width, _BLOCK)
    # A program at least, so that every rank counts, also one with nothing to give.
    _put_kernel[(max(rows * blocks, 1),)](
        local, buffer, turns, buffer.shape[1], local.stride(0), rows * blocks, blocks, width, BLOCK=_BLOCK
    )


def collect_columns(
    peers: Tensor, capacity: int, starts: Tensor | None, widest: int, out: Tensor, turns: Tensor
) -> None:
    """What all ranks have put, side by side, into out [M, N], contiguous.

    peers [ranks] int64: where their buffers begin; capacity: elements of a half; starts [ranks + 1] int32: first
    column of each rank's part, and N, None if all are as wide as the widest, which has `widest` columns.
    """
    rows, width = out.shape
    grid = (max(rows, 1), len(peers), max(triton.cdiv(widest, _BLOCK), 1))
    _collect_kernel[grid](peers, starts, out, turns, capacity, rows, width, widest, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["num_programs"])
def _put_kernel(
    local_ptr, buffer_ptr, turns_ptr, capacity, row_stride, num_programs, blocks, width, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    half = (tl.load(turns_ptr) & 1).to(tl.int64)
    if program == 0:
        tl.store(turns_ptr + 1, tl.load(turns_ptr) + 1)
    if program < num_programs:
        row = (program // blocks).to(tl.int64)
        column = program % blocks * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(local_ptr + row * row_stride + column, mask=column < width)
        tl.store(buffer_ptr + half * capacity + row * width + column, values, mask=column < width)


@triton.jit(do_not_specialize=["rows"])
def _collect_kernel(peers_ptr, starts_ptr, out_ptr, turns_ptr, capacity, rows, width, widest, BLOCK: tl.constexpr):
    row, rank = tl.program_id(0).to(tl.int64), tl.program_id(1)
    put = tl.load(turns_ptr + 1)
    if (row == 0) & (rank == 0) & (tl.program_id(2) == 0):
        tl.store(turns_ptr, put)
    start, part = rank * widest, widest
    if starts_ptr is not None:
        start = tl.load(starts_ptr + rank)
        part = tl.load(starts_ptr + rank + 1) - start
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < part) & (row < rows)
    # Buffers begin at whole pages, which a loaded pointer does not tell.
    peer = tl.multiple_of(tl.load(peers_ptr + rank).to(tl.pointer_type(out_ptr.dtype.element_ty), bitcast=True), 16)
    values = tl.load(peer + ((put - 1) & 1).to(tl.int64) * capacity + row * part + column, mask=inside)
    tl.store(out_ptr + row * width + start + column, values, mask=inside)
