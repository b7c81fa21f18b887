"""Weights in the activations' dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardline.runtime.ops.linear import PackedWeight, linear, pack_weight


@dataclass(frozen=True)
class PlainLinear:
    """See `base.PackedLinear`."""

    weight: PackedWeight

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.panels.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        return linear(x, self.weight, bias, out_dtype=out_dtype)


def pack(weight: Tensor) -> PlainLinear:
    """See `base.Quantization.pack`."""
    return PlainLinear(pack_weight(weight))


pack_lm_head = pack
