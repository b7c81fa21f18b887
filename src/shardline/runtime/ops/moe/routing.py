"""Routing: which experts a token chooses, and with which weights."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.models.feed_forward import Routing


def route_experts(
    kernels: Kernels,
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    *,
    shared_scale: Tensor | None = None,
    counts: Tensor | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids int32, weights float32), each [T, experts_per_token], best first, for float32 `logits` [T, num_experts].

    Scores are the softmax or sigmoid of the logits. The experts with the largest score + bias are chosen, from the best
    groups only; the lowest id wins ties. The weights are the chosen scores times the scale of `routing`, divided by
    their sum if it is `normalized`. With `shared_scale` [T], the logits have one more column, whose sigmoid is written
    there. Each expert's number of tokens is added to `counts` [num_experts] int64. A row's bits depend only on that
    row. On a GPU, a token whose slot in the KV cache is negative (`slots` [T] int64) is padding of a captured batch:
    its ids are -1, and it is not counted.
    """
    ids = kernels.activation_empty(torch.int32, logits.shape[0], routing.experts_per_token)
    weights = kernels.activation_empty(torch.float32, *ids.shape)
    kernels.route_experts(
        logits,
        bias,
        ids,
        weights,
        shared_scale,
        counts,
        routing.scoring == "sigmoid",
        routing.normalized,
        routing.scale,
        routing.num_experts,
        routing.num_groups,
        routing.top_groups,
        routing.group_score == "top2_sum",
        slots,
    )
    return ids, weights


def route_experts_reference(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`route_experts` in plain torch; a stable sort puts the lowest id first."""
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    groups = (scores if bias is None else scores + bias).view(len(logits), routing.num_groups, -1)
    ranked = groups.sort(-1, descending=True)[0]
    group_scores = ranked[..., 0] if routing.group_score == "max" else ranked[..., :2].sum(-1)
    best_groups = group_scores.sort(dim=-1, descending=True, stable=True)[1][:, : routing.top_groups]
    kept = torch.zeros_like(group_scores).scatter(1, best_groups, 1.0)
    eligible = groups.masked_fill(kept[..., None] == 0, -torch.inf).flatten(1)
    ids = eligible.sort(dim=-1, descending=True, stable=True)[1][:, : routing.experts_per_token]
    weights = scores.gather(1, ids)
    if routing.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.to(torch.int32), weights * routing.scale
