"""The residual addition on the GPU, used where no norm follows on this rank."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def add(x: Tensor, y: Tensor, out: Tensor) -> None:
    """As `ops.add.add`, into out; all contiguous."""
    if (count := x.numel()) > 0:
        _add_kernel[(triton.cdiv(count, _BLOCK),)](x, y, out, count, BLOCK=_BLOCK)


@triton.jit
def _add_kernel(x_ptr, y_ptr, out_ptr, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < count).to(tl.float32)
    y = tl.load(y_ptr + place, mask=place < count).to(tl.float32)
    tl.store(out_ptr + place, (x + y).to(out_ptr.dtype.element_ty), mask=place < count)
