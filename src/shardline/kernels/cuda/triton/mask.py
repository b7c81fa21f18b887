"""Masks of allowed tokens, on the GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.launch import EXACT

_BLOCK = 1024


def mask_tokens(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """See ops.sampling.mask; logits [M, V] fp32, rows may be strided."""
    num_rows, width = rows.shape[0], logits.shape[1]
    if num_rows > 0:
        grid = (triton.cdiv(width, _BLOCK), num_rows)
        _mask_kernel[grid](logits, rows, bits, logits.stride(0), bits.stride(0), width, BLOCK=_BLOCK, **EXACT)


@triton.jit
def _mask_kernel(logits_ptr, rows_ptr, bits_ptr, stride, bits_stride, width, BLOCK: tl.constexpr):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + index)
    word = tl.load(bits_ptr + index * bits_stride + token // 32, mask=token < width, other=-1)
    banned = ((word >> (token % 32)) & 1) == 0
    tl.store(logits_ptr + row * stride + token, float("-inf"), mask=banned & (token < width))
