"""The exchange of ranks that hold whole experts: tokens go to their experts' ranks, and the slots' products come back.

Each of the R ranks holds consecutive tokens, given by the R + 1 `token_bounds`, and consecutive experts, given by
`expert_bounds` [R + 1] int64. How much each rank sends to each other rank follows from the `ids` [T, k] of all tokens,
which every rank knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.weights.base import PackedExperts


class ExchangeCounts(NamedTuple):
    """Rows that rank i sends to rank j, [R, R] int64."""

    tokens: Tensor
    """Tokens that are sent: a token is sent to a rank once, however many of its experts that rank holds."""
    slots: Tensor
    """Slots whose products are sent back."""


def count_exchanged(
    kernels: Kernels, ids: Tensor, token_bounds: Sequence[int], expert_bounds: Tensor
) -> ExchangeCounts:
    """How much the ranks send each other. Result and bounds are in host memory. If `ids` are on a device, the call
    waits for them."""
    return ExchangeCounts(*kernels.count_exchanged(ids, list(token_bounds), expert_bounds))


def place_slots(kernels: Kernels, ids: Tensor, places: Tensor, copies: Tensor, first_token: int) -> Tensor:
    """The places [T, k] int32 of the experts `ids` [T, k] int32 of consecutive tokens.

    Expert e has the first copies[e] of places[e]; `places` [num_experts, C] and `copies` [num_experts] are int32. The
    tokens take the copies of an expert in turn; `first_token` is the number of the first.
    """
    out = kernels.activation_empty(torch.int32, *ids.shape)
    kernels.place_slots(ids, places, copies, first_token, out)
    return out


def place_slots_reference(ids: Tensor, places: Tensor, copies: Tensor, first_token: int) -> Tensor:
    """`place_slots` in plain Python."""
    found = [
        [int(places[expert, (first_token + token) % int(copies[expert])]) for expert in chosen]
        for token, chosen in enumerate(ids.tolist())
    ]
    return torch.tensor(found, dtype=torch.int32).view(ids.shape)


def pack_dispatch(kernels: Kernels, x: Tensor, ids: Tensor, expert_bounds: Tensor) -> Tensor:
    """The rows of x [T, H] for each rank, one rank after another: [T * min(k, R), H]. Unused rows at the end are
    undefined."""
    copies = min(ids.shape[1], expert_bounds.shape[0] - 1)
    out = kernels.activation_empty(x.dtype, ids.shape[0] * copies, x.shape[1])
    kernels.pack_dispatch(x, ids, expert_bounds, out)
    return out


def expert_slots(
    kernels: Kernels,
    x: Tensor,
    ids: Tensor,
    weights: PackedExperts,
    *,
    first_expert: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """The products of the slots of these experts, in x's dtype, in the order of tokens and slots: [T * k, N]. Unused
    rows at the end are undefined. x: rows as `expert_up` returns them; bias: see `expert_down`."""
    out = kernels.activation_empty(x.dtype, ids.numel(), weights.out_features)
    kernels.expert_slots(x, ids, first_expert, weights.panels, weights.scales, out, bias)
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
    """The sum over each token's slots, [T, N], with the same bits as `expert_down`.

    rows: [T * k, N], the results of the ranks' `expert_slots` for these tokens, one rank after another.
    """
    out = kernels.activation_empty(rows.dtype, ids.shape[0], rows.shape[1])
    kernels.combine_slots(rows, ids, slot_weights, expert_bounds, shared, shared_scale, out)
    return out


def ranks_of_experts(ids: Tensor, expert_bounds: Tensor) -> Tensor:
    """The rank that holds each slot's expert: the oracle for the kernels above."""
    return torch.bucketize(ids.long(), expert_bounds[1:-1], right=True)
