"""Both halves of a gather over memory that GPUs of one host read from each other.

Each rank puts its rows into its own buffer, all ranks pass a barrier, and each rank collects the parts of all ranks. A
buffer has two halves, used in turn. Before a rank writes a half again, it has passed the barrier of the other half,
which a peer enters only after it has collected the first half. The GPU itself counts whose turn it is, because a
captured step may have an odd number of gathers. `turns` [2] int32 holds a copy of the number of puts, which only
`collect_columns` writes, and that number itself, which only `put_columns` writes. So neither kernel changes the element
that it reads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def put_columns(local: Tensor, buffer: Tensor, turns: Tensor) -> None:
    """Copy local [M, N] (rows may be strided) to the half of buffer [2, elements] whose turn it is."""
    rows, width = local.shape
    blocks = triton.cdiv(width, _BLOCK)
    # At least one program, so that a rank without rows also counts.
    _put_kernel[(max(rows * blocks, 1),)](
        local, buffer, turns, buffer.shape[1], local.stride(0), rows * blocks, blocks, width, BLOCK=_BLOCK
    )


def collect_columns(
    peers: Tensor, capacity: int, starts: Tensor | None, widest: int, out: Tensor, turns: Tensor
) -> None:
    """Collect the parts that all ranks have put, side by side, into out [M, N], contiguous.

    peers [ranks] int64: addresses of their buffers. capacity: elements of a half. starts [ranks + 1] int32: first
    column of each rank's part, and N; None if all parts have `widest` columns. widest: columns of the widest part.
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
    # Buffers begin at page boundaries; the compiler cannot see that from a loaded pointer.
    peer = tl.multiple_of(tl.load(peers_ptr + rank).to(tl.pointer_type(out_ptr.dtype.element_ty), bitcast=True), 16)
    values = tl.load(peer + ((put - 1) & 1).to(tl.int64) * capacity + row * part + column, mask=inside)
    tl.store(out_ptr + row * width + start + column, values, mask=inside)
