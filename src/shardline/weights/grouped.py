"""Weights of few bits, with a scale and a zero point for every group of columns, as GPTQ and AWQ store them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class GroupedWeight:
    """K columns of N rows of a packed weight: (values - zeros) * scales, with scales and zeros for each group of
    columns."""

    values: Tensor
    """[N, K] uint8, 0 to 15"""
    scales: Tensor
    """[N, G], float16, bfloat16 or float32, for the groups that these columns belong to"""
    zeros: Tensor
    """[N, G] uint8, 0 to 16"""
    group_of: Tensor
    """[K] int64: the group, of G, that each column belongs to"""

    def __len__(self) -> int:
        return len(self.values)

    def to(self, device: torch.device) -> GroupedWeight:
        """A copy on `device`."""
        return GroupedWeight(*(part.to(device) for part in (self.values, self.scales, self.zeros, self.group_of)))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K], each element rounded once. For 16-bit scales, the product is exact in float32."""
        steps = self.values.short() - self.zeros.short()[:, self.group_of]
        return (steps.float() * self.scales.float()[:, self.group_of]).to(dtype)
