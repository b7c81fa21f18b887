"""Mixture of experts: every token through the experts that it chooses, and through a block that all tokens share.

Each rank has a part of every expert (expert tensor parallelism), or, with expert parallelism, some experts whole. Exact
numerics compute every element of a slot's product on one rank, and every token's sum over its slots on one rank, in the
order of the slots: one set of bits for all layouts.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.models.partition import split_dim
from shardline.models.spec import Dense, MoE
from shardline.runtime.layers.context import LayerContext
from shardline.runtime.layers.feed_forward import DenseFeedForward
from shardline.runtime.ops.dispatch import kernels
from shardline.runtime.ops.expert_exchange import combine_slots, count_exchanged, expert_slots, pack_dispatch
from shardline.runtime.ops.experts import ExpertWeights, expert_down, expert_up
from shardline.runtime.ops.linear import linear, pack_weight
from shardline.runtime.ops.linear_input import InputForm, LinearInput
from shardline.runtime.ops.routing import route_experts


class Routed(NamedTuple):
    """What some tokens chose."""

    ids: Tensor
    """[T, k] int32"""
    weights: Tensor
    """[T, k] float32"""
    shared_scale: Tensor | None
    """[T] float32: factor of the shared block's output, where it has a gate."""


class Router:
    """x [T, hidden] -> Routed. Every rank holds it whole; logits are fp32 sums in a fixed order."""

    def __init__(self, context: LayerContext, index: int, spec: MoE, counts_tokens: bool) -> None:
        name = f"layers.{index}.feed_forward"
        self._routing = spec.routing
        self._gated = spec.shared_gate
        weights = [context.read(f"{name}.router.weight")]
        if spec.shared_gate:  # one more column of the same product
            weights.append(context.read(f"{name}.shared_gate.weight"))
        self._weight = pack_weight(*weights)
        context.on_loaded(self._weight.panels.nbytes)
        self._bias = context.load(f"{name}.router.bias") if spec.routing.correction_bias else None
        load = context.expert_load
        self._counts = load[index, : spec.routing.num_experts] if load is not None and counts_tokens else None

    def __call__(self, x: Tensor, slots: Tensor | None = None) -> Routed:
        logits = linear(x, self._weight, out_dtype=torch.float32)
        scale = kernels(x).activation_empty(torch.float32, x.shape[0]) if self._gated else None
        ids, weights = route_experts(
            logits, self._routing, self._bias, shared_scale=scale, counts=self._counts, slots=slots
        )
        return Routed(ids, weights, scale)


class Experts:
    """The experts, or parts of all experts, that this rank holds."""

    def __init__(self, context: LayerContext, name: str, spec: Dense, num_experts: int) -> None:
        if spec.bias:
            raise ValueError("experts with biases are not supported")
        mine = split_dim(num_experts, context.experts.size)[context.experts.rank]
        held = range(mine.start, mine.stop) if context.expert_parallel else range(num_experts)
        self.first = held.start
        self.activation = spec.activation
        self.gated = spec.gated
        parts = ("gate", "up") if spec.gated else ("up",)
        self.up = self._stack(context, name, held, parts)
        self.down = self._stack(context, name, held, ("down",))

    @staticmethod
    def _stack(context: LayerContext, name: str, held: range, parts: tuple[str, ...]) -> ExpertWeights:
        stack: ExpertWeights | None = None
        for index, expert in enumerate(held):
            weights = [context.read(f"{name}.experts.{expert}.{part}.weight") for part in parts]
            if stack is None:
                stack = context.quantization.allocate_experts(len(held), *weights)
            context.quantization.pack_expert(stack, index, *weights)
            context.on_loaded(stack.nbytes // len(held))
        assert stack is not None, "every rank has at least one expert"
        return stack

    def inner(self, x: Tensor, ids: Tensor, compact: bool = False) -> Tensor:
        """Activations between both products, see `expert_up`."""
        return expert_up(x, ids, self.up, self.activation, gated=self.gated, first_expert=self.first, compact=compact)


class MoEFeedForward:
    """x [T, hidden] -> [T, hidden], whole on every rank before and after."""

    takes: InputForm = "tensor"
    """The router reads x as it is."""

    def __init__(self, context: LayerContext, index: int, spec: MoE) -> None:
        name = f"layers.{index}.feed_forward"
        self._group = context.group
        self._expert_group = context.experts
        exact = context.numerics == "exact" or context.group.size == 1
        # Replicas have tokens of their own, so that there is nothing to add up over their ranks.
        self._partial_sums = not exact and context.experts.size == context.group.size
        self._whole_experts = context.expert_parallel and context.experts.size > 1
        owns_tokens = self._whole_experts and not self._partial_sums
        self._router = Router(context, index, spec, owns_tokens or context.group.rank == 0)
        self._experts = Experts(context, name, spec.expert, spec.routing.num_experts)
        self._shared = DenseFeedForward(context, f"{name}.shared", spec.shared) if spec.shared is not None else None
        self._inner_widths = [span.size for span in split_dim(spec.expert.intermediate_size, context.group.size)]
        self._output_widths = [span.size for span in split_dim(context.spec.hidden_size, context.group.size)]
        bounds = [0, *(span.stop for span in split_dim(spec.routing.num_experts, context.experts.size))]
        self._expert_bounds = torch.tensor(bounds)
        self._bounds_there = self._expert_bounds.to(context.device)

    def __call__(self, x: LinearInput, replica_tokens: tuple[int, ...], slots: Tensor | None = None) -> Tensor:
        """`replica_tokens`: rows of x on each replica in lockstep; `slots` [T]: see KVGroupInput."""
        assert isinstance(x, Tensor)
        if self._partial_sums:
            return self._with_partial_sums(x, slots)
        if self._whole_experts:
            return self._with_whole_experts(x, replica_tokens)
        return self._with_split_experts(x, slots)

    def _with_split_experts(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """Every rank computes some columns of all slots, twice; between, they gather what the second product reads."""
        routed, experts = self._router(x, slots), self._experts
        inner = self._group.all_gather_columns(experts.inner(x, routed.ids), self._inner_widths)
        shared = self._shared.local(x) if self._shared is not None else None
        local = expert_down(
            inner, routed.ids, routed.weights, experts.down, shared=shared, shared_scale=routed.shared_scale
        )
        return self._group.all_gather_columns(local, self._output_widths)

    def _with_whole_experts(self, x: Tensor, replica_tokens: tuple[int, ...]) -> Tensor:
        """A replica's tokens are shared out over its ranks; each sends its own to the ranks of their experts, in
        whichever replica these are, and adds up what comes back."""
        group, experts, bounds = self._expert_group, self._experts, self._bounds_there
        counts, token_bounds = _token_shares(replica_tokens, self._group.size)
        first = group.rank - self._group.rank
        own_counts = counts[first : first + self._group.size]
        start = sum(own_counts[: self._group.rank])
        own = slice(start, start + own_counts[self._group.rank])
        shared = self._shared.alone(x)[own] if self._shared is not None else None
        routed = self._router(x[own])
        ids = group.all_gather_rows(routed.ids, counts)
        exchanged = count_exchanged(ids, token_bounds, self._expert_bounds)
        tokens = group.all_to_all_rows(pack_dispatch(x[own], routed.ids, bounds), exchanged.tokens, sum(counts))
        slots = expert_slots(experts.inner(tokens, ids, compact=True), ids, experts.down, first_expert=experts.first)
        products = group.all_to_all_rows(slots, exchanged.slots, routed.ids.numel())
        combined = combine_slots(
            products, routed.ids, routed.weights, bounds, shared=shared, shared_scale=routed.shared_scale
        )
        return self._group.all_gather_rows(combined, own_counts)

    def _with_partial_sums(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """Fast numerics: sums over this rank's experts, or over its part of K, are added up over the ranks."""
        routed, experts = self._router(x, slots), self._experts
        local = expert_down(
            experts.inner(x, routed.ids),
            routed.ids,
            routed.weights,
            experts.down,
            first_expert=experts.first,
            out_dtype=torch.float32,
        )
        total = self._group.all_reduce_sum(local)
        if self._shared is not None:
            shared = self._shared.alone(x).float()
            total += shared if routed.shared_scale is None else shared * routed.shared_scale[:, None]
        return total.to(x.dtype)


@lru_cache(maxsize=256)
def _token_shares(replica_tokens: tuple[int, ...], size: int) -> tuple[list[int], list[int]]:
    """(tokens of each rank, `size` a replica; their bounds, one more)."""
    counts = [span.size for num_tokens in replica_tokens for span in split_dim(num_tokens, size)]
    return counts, [0, *itertools.accumulate(counts)]
