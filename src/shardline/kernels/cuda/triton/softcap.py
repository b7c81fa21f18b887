"""The soft cap of final logits, on the GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.launch import EXACT

_BLOCK = 1024


def softcap(logits: Tensor, cap: float) -> None:
    """cap * tanh(logits / cap), in place; logits [M, V] fp32, rows may be strided."""
    num_rows, width = logits.shape
    if num_rows > 0:
        grid = (triton.cdiv(width, _BLOCK), num_rows)
        _softcap_kernel[grid](logits, logits.stride(0), width, cap, BLOCK=_BLOCK, **EXACT)


@triton.jit
def tanh(x):
    """tanh of fp32. Near zero the quotient of exponentials cancels, so the first terms of the series are used there."""
    square = x * x
    series = x * tl.fma(square, tl.fma(square, tl.fma(square, -17.0 / 315, 2.0 / 15), -1.0 / 3), 1.0)
    falling = tl.exp(-2.0 * tl.abs(x))
    quotient = tl.div_rn(1.0 - falling, 1.0 + falling)
    return tl.where(tl.abs(x) < 0.125, series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def _softcap_kernel(logits_ptr, stride, width, cap, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = logits_ptr + tl.program_id(1).to(tl.int64) * stride + column
    x = tl.load(place, mask=column < width, other=0.0)
    tl.store(place, cap * tanh(tl.div_rn(x, tl.full((BLOCK,), cap, tl.float32))), mask=column < width)
