"""Activation functions on the GPU: act(x), or gated, act(gate) * up."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.launch import EXACT

_BLOCK = 1024


def activation(x: Tensor, out: Tensor, name: str, gated: bool) -> None:
    """As in `ops.activation`: x [M, I] (gated: [M, 2 * I], the gate in the first half; rows may be strided) into out
    [M, I]."""
    num_rows, width = out.shape
    if num_rows > 0:
        grid = (triton.cdiv(width, _BLOCK), num_rows)
        _activation_kernel[grid](x, out, x.stride(0), width, NAME=name, IS_GATED=gated, BLOCK=_BLOCK, **EXACT)


@triton.jit
def activate(x, NAME: tl.constexpr):
    """act(x) in fp32."""
    one = tl.full(x.shape, 1.0, tl.float32)
    if NAME == "silu":
        y = x * tl.div_rn(one, 1.0 + tl.exp(-x))
    elif NAME == "gelu_tanh":  # (1 + tanh(u)) / 2 is sigmoid(2u), which does not cancel on the left
        inner = tl.fma(x * x * x, 0.044715, x) * 1.595769122
        y = x * tl.div_rn(one, 1.0 + tl.exp(-inner))
    elif NAME == "gelu":  # 1 + erf cancels on the left; fp64 keeps the digits that matter
        wide = x.to(tl.float64)
        y = (wide * (0.5 + 0.5 * tl.erf(wide * 0.7071067811865476))).to(tl.float32)
    elif NAME == "clamped_swish":
        gate = tl.where(x > 7.0, 7.0, x)
        y = gate * tl.div_rn(one, 1.0 + tl.exp(-1.702 * gate))
    elif NAME == "relu2":
        y = tl.where(x < 0.0, 0.0, x * x)
    else:
        y = tl.where(x < 0.0, 0.0, x)
    return y


@triton.jit
def gated(gate, up, NAME: tl.constexpr, stored: tl.constexpr):
    """act(gate) * up in fp32, where act(gate) is rounded first."""
    acted = activate(gate, NAME).to(stored).to(tl.float32)
    if NAME == "clamped_swish":
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    return acted * up


@triton.jit
def _activation_kernel(
    x_ptr, out_ptr, x_stride, width, NAME: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    stored = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.load(x_ptr + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
        y = gated(x, up, NAME, stored)
    else:
        y = activate(x, NAME)
    tl.store(out_ptr + row * width + column, y.to(stored), mask=inside)
