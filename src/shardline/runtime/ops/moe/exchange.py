"""What ranks with whole experts exchange: tokens to the ranks of their experts, the slots' products back.

Tokens lie on ranks in consecutive parts, `token_bounds` (R + 1 of them), and so do experts, `expert_bounds`
[R + 1] int64.
Which rank sends how much to which follows from `ids` [T, k] of all tokens, which every rank knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.runtime.backends.base import Kernels
from shardline.weights.base import PackedExperts


class ExchangeCounts(NamedTuple):
    """Rows that rank i sends to rank j, [R, R] int64."""

    tokens: Tensor
    """On the way there: a token goes to a rank once, however many of its experts are there."""
    slots: Tensor
    """On the way back."""


def count_exchanged(
    kernels: Kernels, ids: Tensor, token_bounds: Sequence[int], expert_bounds: Tensor
) -> ExchangeCounts:
    """How much all ranks send each other, in host memory, as are the bounds; ids on a device are waited for."""
    return ExchangeCounts(*kernels.count_exchanged(ids, list(token_bounds), expert_bounds))


def pack_dispatch(kernels: Kernels, x: Tensor, ids: Tensor, expert_bounds: Tensor) -> Tensor:
    """The rows of x [T, H] for each rank, one rank after another: [T * min(k, R), H], the end undefined."""
    copies = min(ids.shape[1], expert_bounds.shape[0] - 1)
    out = kernels.activation_empty(x.dtype, ids.shape[0] * copies, x.shape[1])
    kernels.pack_dispatch(x, ids, expert_bounds, out)
    return out


def expert_slots(kernels: Kernels, x: Tensor, ids: Tensor, weights: PackedExperts, *, first_expert: int = 0) -> Tensor:
    """The products of the slots of these experts, in x's dtype, in the order of tokens and slots: [T * k, N], the end
    undefined. x: rows as `expert_up` gives them."""
    out = kernels.activation_empty(x.dtype, ids.numel(), weights.out_features)
    kernels.expert_slots(x, ids, first_expert, weights.panels, weights.scales, out)
    return out


def combine_slots(
    kernels: Kernels,
    rows: Tensor,
    ids: Tensor,
    slot_weights: Tensor,
    expert_bounds: Tensor,
    *,
    shared: Tensor | None = None,
    shared_scale: Tensor | None = None,
) -> Tensor:
    """The sum over each token's slots, with the bits of `expert_down`: [T, N].

    rows: [T * k, N], what the ranks' `expert_slots` have for these tokens, one rank after another.
    """
    out = kernels.activation_empty(rows.dtype, ids.shape[0], rows.shape[1])
    kernels.combine_slots(rows, ids, slot_weights, expert_bounds, shared, shared_scale, out)
    return out


def ranks_of_experts(ids: Tensor, expert_bounds: Tensor) -> Tensor:
    """The rank of every slot: the oracle of what the kernels above derive."""
    return torch.bucketize(ids.long(), expert_bounds[1:-1], right=True)
