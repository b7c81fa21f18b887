"""Digests of rows of logits, on the GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.launch import EXACT

_BLOCK = 1024


def row_digests(logits: Tensor, digests: Tensor) -> None:
    """See ops.sampling.row_digests; logits [M, V] fp32, rows may be strided."""
    if logits.shape[0] > 0:
        _digest_kernel[(logits.shape[0],)](logits, digests, logits.stride(0), logits.shape[1], BLOCK=_BLOCK, **EXACT)


@triton.jit
def _digest_kernel(logits_ptr, digests_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        logit = tl.load(logits_ptr + row * stride + column, mask=column < width, other=0.0)
        bits = logit.to(tl.uint32, bitcast=True).to(tl.uint64)
        mixed = (column.to(tl.uint64) << 32) | bits
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
        total += tl.where(column < width, mixed ^ (mixed >> 31), 0)
    tl.store(digests_ptr + row, tl.sum(total, 0).to(tl.int64, bitcast=True))
