"""W8A8: weights in int8 with a scale per output, activations quantized to int8 row by row as they come."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardline.runtime.ops.linear_int8 import Int8Weight, linear_int8, pack_int8
from shardline.runtime.ops.quantize_rows import quantize_rows


@dataclass(frozen=True)
class Int8Linear:
    """See `base.PackedLinear`."""

    weight: Int8Weight

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        return linear_int8(quantize_rows(x), self.weight, bias, out_dtype=out_dtype or x.dtype)


def pack(weight: Tensor) -> Int8Linear:
    """See `base.Quantization.pack`."""
    return Int8Linear(pack_int8(weight))


pack_lm_head = pack
