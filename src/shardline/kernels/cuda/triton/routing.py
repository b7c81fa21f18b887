"""Routing on the GPU: which experts a token chooses, with one program per token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.launch import EXACT


def route_experts(
    logits: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    shared_scale: Tensor | None,
    counts: Tensor | None,
    sigmoid: bool,
    normalized: bool,
    scale: float,
    num_experts: int,
    num_groups: int,
    top_groups: int,
    top2_sum: bool,
    slots: Tensor | None = None,
) -> None:
    """As `ops.moe.routing.route_experts`, into ids and weights [T, k]. A token whose slot (`slots` [T] int64) is
    negative is padding: it chooses no expert, and its ids are -1."""
    num_tokens, chosen = ids.shape
    if num_tokens > 0:
        size = num_experts // num_groups
        _route_kernel[(num_tokens,)](
            logits,
            bias,
            ids,
            weights,
            shared_scale,
            counts,
            slots,
            logits.stride(0),
            scale,
            IS_SIGMOID=sigmoid,
            IS_NORMALIZED=normalized,
            NUM_GROUPS=num_groups,
            GROUP_SIZE=size,
            TOP_GROUPS=top_groups,
            IS_TOP2_SUM=top2_sum,
            CHOSEN=chosen,
            SLOTS=triton.next_power_of_2(chosen),
            GROUPS=triton.next_power_of_2(num_groups),
            EXPERTS=triton.next_power_of_2(size),
            num_warps=1 if num_experts <= 128 else 4,
            **EXACT,
        )


@triton.jit
def _best(value, index, WIDTH: tl.constexpr):
    """(the largest value, the lowest index that has it); the index is valid even if all values are -inf."""
    top = tl.max(value, axis=0)
    return top, tl.min(tl.where(value == top, index, WIDTH), axis=0)


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    shared_scale_ptr,
    counts_ptr,
    slots_ptr,
    logits_stride,
    scale,
    IS_SIGMOID: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    IS_TOP2_SUM: tl.constexpr,
    CHOSEN: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + token * logits_stride
    NEVER: tl.constexpr = -3.0e38  # below every expert's score, above the padding's -inf
    group, member = tl.arange(0, GROUPS), tl.arange(0, EXPERTS)
    inside = (group[:, None] < NUM_GROUPS) & (member[None, :] < GROUP_SIZE)
    expert = tl.where(inside, group[:, None] * GROUP_SIZE + member[None, :], NUM_GROUPS * GROUP_SIZE)
    logit = tl.load(logits + expert, mask=inside, other=float("-inf"))
    one = tl.full((GROUPS, EXPERTS), 1.0, tl.float32)
    if IS_SIGMOID:
        score = tl.div_rn(one, 1.0 + tl.exp(-logit))
    else:
        raised = tl.exp(logit - tl.max(logit))
        score = tl.div_rn(raised, one * tl.sum(raised))
    eligible = score
    if bias_ptr is not None:
        eligible = score + tl.load(bias_ptr + expert, mask=inside, other=0.0)
    eligible = tl.where(eligible == eligible, eligible, NEVER)
    if TOP_GROUPS < NUM_GROUPS:
        eligible = tl.where(inside, eligible, float("-inf"))
        group_score = tl.max(eligible, axis=1)
        if IS_TOP2_SUM:
            first = tl.min(tl.where(eligible == group_score[:, None], member[None, :], EXPERTS), axis=1)
            others = tl.where(member[None, :] == first[:, None], float("-inf"), eligible)
            group_score = group_score + tl.max(others, axis=1)
        kept = group < 0
        for _taken in range(TOP_GROUPS):
            _top, best = _best(group_score, group, GROUPS)
            kept = kept | (group == best)
            group_score = tl.where(group == best, float("-inf"), group_score)
        eligible = tl.where(kept[:, None], eligible, NEVER)
    eligible = tl.where(inside, eligible, float("-inf"))

    flat_expert = tl.reshape(expert, (GROUPS * EXPERTS,))
    flat_eligible = tl.reshape(eligible, (GROUPS * EXPERTS,))
    flat_score = tl.reshape(score, (GROUPS * EXPERTS,))
    place = tl.arange(0, SLOTS)
    chosen, weights = tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.float32)
    total = tl.zeros((), tl.float32)
    for slot in tl.static_range(CHOSEN):
        _top, best = _best(flat_eligible, flat_expert, NUM_GROUPS * GROUP_SIZE)
        is_best = flat_expert == best
        flat_eligible = tl.where(is_best, float("-inf"), flat_eligible)
        weight = tl.sum(tl.where(is_best, flat_score, 0.0), axis=0)
        total += weight
        chosen, weights = tl.where(place == slot, best, chosen), tl.where(place == slot, weight, weights)
    if IS_NORMALIZED:
        weights = tl.div_rn(weights, tl.zeros_like(weights) + (total + 1e-20))
    is_slot = place < CHOSEN
    tl.store(weights_ptr + token * CHOSEN + place, weights * scale, mask=is_slot)
    if slots_ptr is not None:
        chosen = tl.where(tl.load(slots_ptr + token) < 0, -1, chosen)
    tl.store(ids_ptr + token * CHOSEN + place, chosen, mask=is_slot)
    if counts_ptr is not None:
        one_more = tl.full((SLOTS,), 1, tl.int64)
        tl.atomic_add(counts_ptr + chosen, one_more, mask=is_slot & (chosen >= 0), sem="relaxed")
    if shared_scale_ptr is not None:
        gate = tl.load(logits + NUM_GROUPS * GROUP_SIZE)
        tl.store(shared_scale_ptr + token, tl.div_rn(1.0, 1.0 + tl.exp(-gate)))
