"""Rotary position embedding, and what else depends on the position of a token alone."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.models.parts import QueryScale, Rope


def rotary_table(inv_freq: Tensor, max_positions: int, attention_scaling: float = 1.0) -> Tensor:
    """[max_positions, rot] fp32, cosines then sines, from inv_freq [rot / 2] fp32.

    The angle is an fp32 product, as in the models' own code; its cosine and sine are taken in fp64, so that the table
    has the same bits on every CPU.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inv_freq.float()).double()
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * attention_scaling).float()


class RotaryTables:
    """The tables of a stage, one per distinct Rope."""

    def __init__(self, max_positions: int, device: torch.device) -> None:
        self._max_positions = max_positions
        self._device = device
        self._tables: dict[Rope, Tensor] = {}

    def of(self, rope: Rope) -> Tensor:
        """See `rotary_table`."""
        if rope not in self._tables:
            inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32)
            table = rotary_table(inv_freq, self._max_positions, rope.attention_scaling)
            self._tables[rope] = table.to(self._device)
        return self._tables[rope]


def query_factors(scale: QueryScale, max_positions: int) -> Tensor:
    """The factor of queries at each position, float32 [max_positions]; it is computed in float64."""
    steps = (torch.arange(max_positions, dtype=torch.float64) + scale.offset) // scale.length
    return (1 + scale.beta * torch.log1p(steps)).float()


def apply_rope(
    kernels: Kernels, query: Tensor, key: Tensor, positions: Tensor, table: Tensor, *, interleaved: bool = False
) -> None:
    """Rotates query [T, Hq, D] and key [T, Hk, D] in place by positions [T] (int32 or int64).

    The first `table.shape[1]` elements of each head are rotated, as halves (i, i + rot / 2) or, if interleaved, as
    neighbours (2i, 2i + 1). The rotation is computed in fp32 and rounded once. The strides of tokens and heads are
    free, so x may be a slice.
    """
    kernels.apply_rope(query, positions, table, interleaved)
    kernels.apply_rope(key, positions, table, interleaved)


def apply_rope_reference(x: Tensor, positions: Tensor, table: Tensor, *, interleaved: bool = False) -> Tensor:
    """A rotated copy of x [T, H, D]."""
    rot = table.shape[1]
    cos, sin = table[positions.long()].double()[:, None].chunk(2, dim=-1)
    rotated = x.double()
    if interleaved:
        first, second = rotated[..., 0:rot:2].clone(), rotated[..., 1:rot:2].clone()
        rotated[..., 0:rot:2] = first * cos - second * sin
        rotated[..., 1:rot:2] = second * cos + first * sin
    else:
        first, second = rotated[..., : rot // 2].clone(), rotated[..., rot // 2 : rot].clone()
        rotated[..., : rot // 2] = first * cos - second * sin
        rotated[..., rot // 2 : rot] = second * cos + first * sin
    return rotated.to(x.dtype)
