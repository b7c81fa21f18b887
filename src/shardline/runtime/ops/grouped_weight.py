"""A weight in 4 bits with a scale and a zero point for every group of columns, as GPTQ and AWQ checkpoints have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupedWeight:
    """K columns of N rows of a weight: (values - zeros) * scales, by groups of columns."""

    values: Tensor
    """[N, K] uint8, 0 to 15"""
    scales: Tensor
    """[N, G], float16, bfloat16 or float32, of the groups that these columns lie in"""
    zeros: Tensor
    """[N, G] uint8, 0 to 16"""
    group_of: Tensor
    """[K] int64: which of the G groups a column lies in"""

    def __len__(self) -> int:
        return len(self.values)

    def to(self, device: torch.device) -> GroupedWeight:
        """The same on `device`."""
        return GroupedWeight(*(part.to(device) for part in (self.values, self.scales, self.zeros, self.group_of)))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[N, K], each element rounded once: the product is exact in float32 for scales of 16 bits."""
        steps = self.values.to(torch.int16) - self.zeros.to(torch.int16)[:, self.group_of]
        return (steps.float() * self.scales.float()[:, self.group_of]).to(dtype)


def stacked_weights(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """The rows of all, one weight after another; their columns are grouped alike."""
    return GroupedWeight(
        torch.cat([weight.values for weight in weights]),
        torch.cat([weight.scales for weight in weights]),
        torch.cat([weight.zeros for weight in weights]),
        weights[0].group_of,
    )
