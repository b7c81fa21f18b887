"""The linears of many experts at once, over tokens sorted by expert.

`ids` [T, k] int32 are the experts that each token chose (see `ops.moe.routing`). Each choice is called a slot. A rank
holds the experts [first_expert, first_expert + E) and computes their slots, as rows sorted by expert and then by token.
A row's bits depend only on its token, not on the other tokens that chose the same expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.runtime.ops.activation import ActivationName, activation_reference, gated_activation_reference
from shardline.weights.base import PackedExperts


def expert_up(
    kernels: Kernels,
    x: Tensor,
    ids: Tensor,
    weights: PackedExperts,
    name: ActivationName,
    *,
    gated: bool,
    first_expert: int = 0,
    compact: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """For every slot of these experts: act(up), or, if gated, act(gate) * up, where `weights` has the gates' rows
    first.

    x: [T, K]; with `compact`, only the tokens that chose one of these experts, in order. Returns [T * k, I]. On the
    CPU, the slots' rows come first, sorted by expert, and the rows after them are undefined. On a GPU, rows are in the
    order of slots (with `compact`, the slots of those tokens come first), and the rows of other experts' slots are
    undefined. The product, with the expert's row of `bias` [E, outputs of `weights`], is rounded once. Then the result
    is rounded as in `gated_activation`. On the CPU, `bias` may also be one of each row: [rows, 1, outputs] float32, or
    [rows, 2, outputs], where factors of the sums come behind.
    """
    width = weights.out_features // 2 if gated else weights.out_features
    out = kernels.activation_empty(x.dtype, ids.numel(), width)
    kernels.expert_up(x, ids, first_expert, compact, weights.panels, weights.scales, name, gated, out, bias)
    return out


def expert_down(
    kernels: Kernels,
    x: Tensor,
    ids: Tensor,
    slot_weights: Tensor,
    weights: PackedExperts,
    *,
    first_expert: int = 0,
    shared: Tensor | None = None,
    shared_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """For each token, the sum over its slots of slot_weights [T, k] times the slot's product, in slot order: [T, N].

    x: rows as `expert_up` returns them. A slot's product, with the expert's row of `bias` [E, N], or as in `expert_up`,
    is rounded to `out_dtype` (default: x's dtype). The sum is computed in fp32, shared_scale [T] * shared [T, N] is
    added last, and the total is rounded once.
    """
    out = kernels.activation_empty(out_dtype or x.dtype, ids.shape[0], weights.out_features)
    packed = weights.panels, weights.scales
    kernels.expert_down(x, ids, slot_weights, first_expert, *packed, shared, shared_scale, out, bias)
    return out


def expert_up_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    name: ActivationName,
    *,
    gated: bool,
    first_expert: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """`expert_up` for unpacked weights [E, out, K], without the undefined rows at the end."""
    rows = []
    for expert, weight in enumerate(weights):
        tokens = (ids == first_expert + expert).any(1).nonzero()[:, 0]
        product = x[tokens].double() @ weight.double().T
        product = (product if bias is None else product + bias[expert].double()).to(x.dtype)
        rows.append(gated_activation_reference(product, name) if gated else activation_reference(product, name))
    return torch.cat(rows)


def slot_products_reference(
    x: Tensor, ids: Tensor, weights: Tensor, first_expert: int = 0, bias: Tensor | None = None
) -> Tensor:
    """[T, k, N]: the product of every slot in x's dtype, zero for other experts, for unpacked weights [E, N, K]."""
    out = torch.zeros(*ids.shape, weights.shape[1], dtype=x.dtype)
    begin = 0
    for expert, weight in enumerate(weights):
        chosen = ids == first_expert + expert
        end = begin + int(chosen.sum())
        product = x[begin:end].double() @ weight.double().T
        out[chosen] = (product if bias is None else product + bias[expert].double()).to(x.dtype)
        begin = end
    return out


def expert_down_reference(
    x: Tensor,
    ids: Tensor,
    slot_weights: Tensor,
    weights: Tensor,
    *,
    first_expert: int = 0,
    shared: Tensor | None = None,
    shared_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`expert_down` for unpacked weights [E, N, K]."""
    products = slot_products_reference(x, ids, weights, first_expert, bias).double()
    total = (products * slot_weights[..., None]).sum(1)
    if shared is not None:
        scale = torch.ones(len(shared)) if shared_scale is None else shared_scale
        total = total + scale[:, None] * shared.double()
    return total.to(x.dtype)
