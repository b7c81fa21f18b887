"""What adapters add to the outputs of a linear: scale * up (down x), each row with its own adapter."""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from shardline.kernels.low_rank import LowRankWeights
from shardline.kernels.tensors import RowBias


class LowRankKernels(Protocol):
    """The kernels of adapters."""

    def low_rank_empty(
        self, num_slots: int, max_rank: int, in_features: int, widths: tuple[int, ...], dtype: torch.dtype, /
    ) -> LowRankWeights:
        """See `LowRankWeights.empty`."""

    def low_rank(
        self, x: Tensor, slots: Tensor, weights: LowRankWeights, bias: Tensor | None, scaled: bool, /
    ) -> Tensor | RowBias: ...
    def expert_low_rank(
        self,
        x: Tensor,
        ids: Tensor,
        first_expert: int,
        num_experts: int,
        compact: bool,
        sorted: bool,
        adapters: Tensor,
        weights: LowRankWeights,
        bias: Tensor | None,
        scaled: bool,
        /,
    ) -> Tensor | RowBias: ...


def low_rank(
    kernels: LowRankKernels,
    x: Tensor,
    slots: Tensor,
    weights: LowRankWeights,
    bias: Tensor | None = None,
    *,
    scaled: bool = False,
) -> Tensor:
    """bias + factor * scale * up (down x) for the rows x [M, in_features], float32 [M, out_features]. With `scaled`,
    [M, 2, out_features]: the factors of outputs come behind; without, they must all be 1.

    `slots` [M] int32: the adapter of each row; negative: none, so that the row is the bias, or -0, which changes
    nothing when it is added. Sums are fp32: those over in_features in a few chains, those over the rank in one, and
    the scale is applied between them. The bits of a row depend on that row and its adapter alone. torch's kernels
    return a `RowBias`, which only their own products read.
    """
    return cast(Tensor, kernels.low_rank(x, slots, weights, bias, scaled))


def add_low_rank(
    kernels: LowRankKernels, rows: Tensor, x: Tensor, slots: Tensor, weights: LowRankWeights, *, scaled: bool
) -> Tensor:
    """rows [M, out_features] with what `low_rank` has for them, rounded once."""
    added = kernels.low_rank(x, slots, weights, None, scaled)
    if isinstance(added, RowBias):
        return added.change(rows)
    sums = rows.float() * added[:, 1] + added[:, 0] if scaled else rows.float() + added
    return sums.to(rows.dtype)


def expert_low_rank(
    kernels: LowRankKernels,
    x: Tensor,
    ids: Tensor,
    adapters: Tensor,
    weights: LowRankWeights,
    num_experts: int,
    bias: Tensor | None = None,
    *,
    first_expert: int = 0,
    compact: bool = False,
    sorted: bool = False,
    scaled: bool = False,
) -> Tensor:
    """`low_rank` for the rows of `expert_up` and `expert_down`, sorted by expert: float32 [T * k, 1, out_features], or
    with `scaled` [T * k, 2, out_features]; rows after those of the experts are undefined.

    `ids` [T, k], `first_expert`, `compact`: see `expert_up`. `adapters` [T] int32: of each token. The weights of
    adapter a for expert e have the slot a * num_experts + e. `bias` [num_experts, out_features]: that of each expert.
    x: the input of `expert_up`, or with `sorted` that of `expert_down`.
    """
    chosen = ids, first_expert, num_experts, compact, sorted, adapters
    return cast(Tensor, kernels.expert_low_rank(x, *chosen, weights, bias, scaled))


def low_rank_reference(
    x: Tensor, slots: Tensor, weights: LowRankWeights, bias: Tensor | None = None, *, scaled: bool = False
) -> Tensor:
    """`low_rank` in plain torch, in float64 until the last rounding."""
    base = torch.zeros(weights.up.shape[2], dtype=torch.float64) if bias is None else bias.double()
    out = base.repeat(len(x), 1)
    factors = torch.ones_like(out)
    for row, slot in enumerate(slots.tolist()):
        for part in range(weights.ranks.shape[1] if slot >= 0 else 0):
            up, columns = weights.part_of_up(slot, part).double(), weights.columns(part)
            down = weights.part_of_down(slot, part).transpose(1, 2).double()
            hidden = down.reshape(-1, down.shape[2] * down.shape[3])[: len(up), : x.shape[1]] @ x[row].double()
            if weights.scaled[slot, part] and len(up):
                factors[row, columns] = weights.factors[slot, columns].double()
            out[row, columns] += factors[row, columns] * (hidden * float(weights.scales[slot, part]) @ up)
    return torch.stack([out, factors], dim=1).float() if scaled else out.float()
