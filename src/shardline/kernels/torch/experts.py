"""Mixture of experts: routing, and the products of all experts over slots sorted by expert.

A slot is a token's choice of an expert. The rows of `expert_up` are sorted by expert and then by token, and those of
the experts of this rank come first.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardline.kernels.tensors import RowBias
from shardline.kernels.torch.elementwise import sigmoid
from shardline.kernels.torch.formats import FormatKernels
from shardline.weights.base import RotatedScales
from shardline.weights.rotation import rotate_reference

Scales = Tensor | tuple[object, ...] | None
"""See `contract.Kernels`; there are none of groups."""


class Slots(NamedTuple):
    """The slots of the experts of a rank, sorted by expert and then by token."""

    order: Tensor
    """[num_slots] int64: indices into the flattened ids"""
    counts: list[int]
    """Number of slots of each expert."""

    def tokens(self, ids: Tensor) -> Tensor:
        """[num_slots]: the token of each."""
        return self.order // max(1, ids.shape[1])

    def experts(self) -> Tensor:
        """[num_slots]: the expert of each, counted from the first of the rank."""
        counts = torch.tensor(self.counts, device=self.order.device)
        return torch.arange(len(counts), device=counts.device).repeat_interleave(counts)

    def rows(self, x: Tensor, ids: Tensor, compact: bool) -> Tensor:
        """The row of x of each; with `compact`, x has only the tokens that chose one of the experts."""
        tokens = self.tokens(ids)
        if compact:
            is_there = torch.zeros(len(ids), dtype=torch.int64, device=ids.device).index_fill_(0, tokens, 1)
            tokens = (is_there.cumsum(0) - 1).index_select(0, tokens)
        return x.index_select(0, tokens)


class ExpertKernels(FormatKernels):
    """See `contract.Kernels`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copied_experts: MutableMapping[Tensor, Sequence[Tensor | None]] = WeakIdKeyDictionary()
        """Of panels [E, ...] that have no memory of their own: each expert's, if it has been copied to the device."""

    def expert_up(
        self,
        x: Tensor,
        ids: Tensor,
        first_expert: int,
        compact: bool,
        panels: Tensor,
        scales: Scales,
        name: str,
        gated: bool,
        out: Tensor,
        bias: Tensor | RowBias | None,
    ) -> None:
        slots, width = slots_of(ids, first_expert, len(panels)), out.shape[1]
        rows = slots.rows(x, ids, compact)
        product = self._products(rows, slots, panels, scales, bias, 2 * width if gated else width)
        self.activation(product, out[: len(product)], name, gated)

    def expert_down(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        first_expert: int,
        panels: Tensor,
        scales: Scales,
        shared: Tensor | None,
        shared_scale: Tensor | None,
        out: Tensor,
        bias: Tensor | RowBias | None,
    ) -> None:
        slots, width = slots_of(ids, first_expert, len(panels)), out.shape[1]
        product = self._products(x[: len(slots.order)], slots, panels, scales, bias, width, out.dtype)
        placed = product.new_zeros(ids.numel(), width).index_copy_(0, slots.order, product)
        _add_slots(placed.view(*ids.shape, width), weights, shared, shared_scale, out)

    def expert_slots(
        self,
        x: Tensor,
        ids: Tensor,
        first_expert: int,
        panels: Tensor,
        scales: Scales,
        out: Tensor,
        bias: Tensor | RowBias | None,
    ) -> None:
        slots = slots_of(ids, first_expert, len(panels))
        product = self._products(x[: len(slots.order)], slots, panels, scales, bias, out.shape[1])
        out[: len(product)] = product.index_select(0, slots.order.argsort())

    def _products(
        self,
        rows: Tensor,
        slots: Slots,
        panels: Tensor,
        scales: Scales,
        bias: Tensor | RowBias | None,
        width: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Rows sorted by expert [num_slots, K], each times its expert's weight: [num_slots, width] of `dtype` (default:
        that of the rows)."""
        out = rows.new_empty(len(rows), width, dtype=dtype)
        if isinstance(scales, RotatedScales):
            rows, scales = rotate_reference(rows), scales.scales
        assert not isinstance(scales, tuple), "no experts are kept in groups"
        held = self.copied_experts.get(panels, panels)
        first, own = 0, bias.bias if isinstance(bias, RowBias) else bias
        for expert, count in enumerate(slots.counts):
            if count:
                some = slice(first, first + count)
                own_scales, own_bias = (None if part is None else part[expert] for part in (scales, own))
                weight = held[expert]
                assert weight is not None, "a token chose an expert that is not there"
                out[some] = self.multiply_packed(rows[some], weight, own_scales, own_bias, width, out.dtype)
                first += count
        return bias.change(out) if isinstance(bias, RowBias) else out


def combine_slots(
    rows: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert_bounds: Tensor,
    shared: Tensor | None,
    shared_scale: Tensor | None,
    out: Tensor,
) -> None:
    order = _ranks_of(ids, expert_bounds).flatten().argsort(stable=True)
    placed = rows.new_empty(ids.numel(), rows.shape[1]).index_copy_(0, order, rows[: len(order)])
    _add_slots(placed.view(*ids.shape, rows.shape[1]), weights, shared, shared_scale, out)


def place_slots(ids: Tensor, places: Tensor, copies: Tensor, first_token: int, out: Tensor) -> None:
    flat = ids.reshape(-1)
    tokens = torch.arange(first_token, first_token + len(ids), device=ids.device).repeat_interleave(ids.shape[1])
    turns = tokens % copies.index_select(0, flat)
    out.copy_(places.view(-1).index_select(0, flat * places.shape[1] + turns).view(ids.shape))


def pack_dispatch(x: Tensor, ids: Tensor, expert_bounds: Tensor, out: Tensor) -> None:
    ranks = torch.arange(len(expert_bounds) - 1, device=ids.device)
    goes = (_ranks_of(ids, expert_bounds)[None] == ranks[:, None, None]).any(2)
    tokens = goes.nonzero()[:, 1]
    out[: len(tokens)] = x.index_select(0, tokens)


def count_exchanged(ids: Tensor, token_bounds: list[int], expert_bounds: Tensor) -> tuple[Tensor, Tensor]:
    size, on_host = len(expert_bounds) - 1, ids.cpu()
    goes = (_ranks_of(on_host, expert_bounds)[..., None] == torch.arange(size)).long()
    parts = [goes[begin:end] for begin, end in pairwise(token_bounds)]
    tokens = torch.stack([part.amax(1).sum(0) if part.numel() else torch.zeros(size).long() for part in parts])
    return tokens, torch.stack([part.sum((0, 1)) for part in parts], 1)


def route_experts(
    logits: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    shared_scale: Tensor | None,
    counts: Tensor | None,
    is_sigmoid: bool,
    normalized: bool,
    scale: float,
    num_experts: int,
    num_groups: int,
    top_groups: int,
    top2_sum: bool,
    slots: Tensor | None,
) -> None:
    """`slots` are not read: no step is padded."""
    own = logits[:, :num_experts].contiguous()
    scores = sigmoid(own) if is_sigmoid else own.softmax(1)
    groups = (scores if bias is None else scores + bias).view(len(own), num_groups, num_experts // num_groups)
    if num_groups > 1:
        ranked = groups.sort(-1, descending=True)[0]
        group_scores = ranked[..., 0] + ranked[..., 1] if top2_sum else ranked[..., 0]
        best = group_scores.sort(dim=-1, descending=True, stable=True)[1][:, :top_groups]
        kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, best, True)
        groups = groups.masked_fill(~kept[..., None], -torch.inf)
    # A stable sort puts the lowest id first.
    chosen = groups.flatten(1).sort(dim=-1, descending=True, stable=True)[1][:, : ids.shape[1]]
    ids.copy_(chosen)
    own_weights = scores.gather(1, chosen)
    if normalized:
        own_weights = own_weights / (_sum_in_order(own_weights)[:, None] + 1e-20)
    weights.copy_(own_weights * scale)
    if shared_scale is not None:
        shared_scale.copy_(sigmoid(logits[:, num_experts].contiguous()))
    if counts is not None:
        counts += torch.bincount(chosen.flatten(), minlength=num_experts).to(counts)


def slots_of(ids: Tensor, first_expert: int, num_experts: int) -> Slots:
    """The slots of the experts [first_expert, first_expert + num_experts)."""
    flat = ids.flatten() - first_expert
    own = ((flat >= 0) & (flat < num_experts)).nonzero()[:, 0]
    experts = flat.index_select(0, own)
    order = own.index_select(0, experts.argsort(stable=True))
    return Slots(order, torch.bincount(experts, minlength=num_experts).tolist())


def _ranks_of(ids: Tensor, expert_bounds: Tensor) -> Tensor:
    """The rank that holds each slot's expert."""
    return torch.bucketize(ids.long(), expert_bounds[1:-1].to(ids.device), right=True)


def _add_slots(
    products: Tensor, weights: Tensor, shared: Tensor | None, shared_scale: Tensor | None, out: Tensor
) -> None:
    """The sum of products [T, k, N] times weights [T, k], slot by slot in float32, plus the shared output, to out."""
    total = torch.zeros(out.shape, device=out.device)
    for slot in range(products.shape[1]):
        total += products[:, slot].float() * weights[:, slot, None]
    if shared is not None:
        total += shared.float() if shared_scale is None else shared.float() * shared_scale[:, None]
    out.copy_(total)


def _sum_in_order(x: Tensor) -> Tensor:
    """The sums of rows [M, k], one number after another."""
    total = x[:, 0].clone()
    for column in range(1, x.shape[1]):
        total += x[:, column]
    return total
