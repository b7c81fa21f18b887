"""Steps before, between and after the exchanges of ranks that hold whole experts, on the GPU.

Stable sorts put rows in order, so the host need not wait for their number; only the exchange itself needs the counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.kernels.cuda.triton.experts import (
    add_slots,
    first_where,
    grouped_linear,
    is_here,
    tokens_here_first,
)


def expert_slots(
    x: Tensor,
    ids: Tensor,
    first_expert: int,
    panels: Tensor,
    scales: Tensor | tuple[object, ...] | None,
    out: Tensor,
    bias: Tensor | None = None,
) -> None:
    """As `ops.moe.exchange.expert_slots`, into out [T * k, N]; x is the output of `expert_up` with `compact`."""
    assert bias is None, "see deployment.gpu_support"
    num_experts = panels.shape[0]
    ids = tokens_here_first(ids, first_expert, num_experts)
    products = torch.empty(out.shape, dtype=out.dtype, device=x.device)
    grouped_linear(x, ids, first_expert, panels, scales, 1, products)
    torch.index_select(products, 0, first_where(is_here(ids, first_expert, num_experts).flatten()), out=out)


def pack_dispatch(x: Tensor, ids: Tensor, expert_bounds: Tensor, out: Tensor) -> None:
    """As `ops.moe.exchange.pack_dispatch`, into out."""
    num_ranks, num_tokens = len(expert_bounds) - 1, len(ids)
    if num_tokens > 0:
        ranks = torch.arange(num_ranks, device=x.device)[:, None, None]
        wanted = (ranks_of(ids, expert_bounds) == ranks).any(2)
        torch.index_select(x, 0, first_where(wanted.flatten())[: len(out)] % num_tokens, out=out)


def combine_slots(
    rows: Tensor,
    ids: Tensor,
    slot_weights: Tensor,
    expert_bounds: Tensor,
    shared: Tensor | None,
    shared_scale: Tensor | None,
    out: Tensor,
) -> None:
    """As `ops.moe.exchange.combine_slots`, into out."""
    by_rank = torch.argsort(ranks_of(ids, expert_bounds).flatten(), stable=True)
    products = torch.empty_like(rows)
    products.index_copy_(0, by_rank, rows)
    add_slots(products, ids, slot_weights, 0, 1 << 30, shared, shared_scale, out)


def ranks_of(ids: Tensor, expert_bounds: Tensor) -> Tensor:
    """The rank that holds each slot's expert."""
    return torch.bucketize(ids.long(), expert_bounds[1:-1], right=True)
