"""Mixture of experts: every token passes through the experts that it chooses, and through a block that all tokens
share.

Each rank holds a part of every expert (expert tensor parallelism), or, with expert parallelism, some whole experts.
With exact numerics, one rank computes every element of a slot's product, and one rank computes a token's sum over its
slots, in slot order. So all layouts give the same bits.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.kernels.tensors import InputForm, LinearInput
from shardline.models.feed_forward import Dense, MoE
from shardline.models.parameters import parse_name
from shardline.models.partition import split_dim
from shardline.models.parts import Norm
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.expert_adapters import ExpertAdapters, make_expert_adapters
from shardline.runtime.layers.expert_places import ExpertPlaces
from shardline.runtime.layers.feed_forward import DenseFeedForward
from shardline.runtime.layers.linear import WholeLinear
from shardline.runtime.layers.norm import NormLayer
from shardline.runtime.ops.add import add
from shardline.runtime.ops.moe.exchange import combine_slots, count_exchanged, expert_slots, pack_dispatch, place_slots
from shardline.runtime.ops.moe.experts import expert_down, expert_up
from shardline.runtime.ops.moe.routing import route_experts
from shardline.runtime.ops.scale import scale_rows
from shardline.runtime.step import Rows
from shardline.weights.base import PackedExperts
from shardline.weights.formats import plain


class Routed(NamedTuple):
    """The experts that tokens chose, and their weights."""

    ids: Tensor
    """[T, k] int32"""
    weights: Tensor
    """[T, k] float32"""
    shared_scale: Tensor | None
    """[T] float32: factor of the shared block's output; None if it has no gate."""
    input_scale: Tensor | None = None
    """[T] float32: factor of the experts' input; None if there is none."""


class Router:
    """x [T, hidden] -> Routed. Every rank holds the whole router; logits are fp32 sums in a fixed order."""

    def __init__(self, loader: LayerLoader, name: str, spec: MoE, counts_tokens: bool) -> None:
        stage, index = loader.stage, parse_name(f"{name}.router.weight").layer
        self._kernels = stage.kernels
        self._routing = spec.routing
        self._gated = spec.shared_gate
        weights = [loader.read(f"{name}.router.weight")]
        if spec.shared_gate:  # the gate is one more column of the same product
            weights.append(loader.read(f"{name}.shared_gate.weight"))
        self._linear = plain.Format().pack_linear(stage.kernels, *weights)
        loader.on_loaded(self._linear.nbytes)
        self._bias = loader.load(f"{name}.router.bias") if spec.routing.correction_bias else None
        self._logits_bias = loader.load(f"{name}.router_logits.bias") if spec.routing.logits_bias else None
        factor = spec.routing.logits_scale
        self._logits_factor = None if factor == 1.0 else torch.tensor([factor], device=stage.device)
        self._expert_scale = loader.load(f"{name}.expert_scale.bias") if spec.routing.expert_scale else None
        assert self._logits_bias is None or not spec.shared_gate, "the gate is a column of the router without a bias"
        load = stage.expert_load
        self._counts = load[index, : spec.routing.num_experts] if load is not None and counts_tokens else None

    def __call__(self, x: Tensor, slots: Tensor | None = None) -> Routed:
        kernels = self._kernels
        logits = self._linear(x, self._logits_bias, out_dtype=torch.float32)
        if self._logits_factor is not None:
            logits = scale_rows(kernels, logits, self._logits_factor)
        scale = kernels.activation_empty(torch.float32, x.shape[0]) if self._gated else None
        ids, weights = route_experts(
            kernels, logits, self._routing, self._bias, shared_scale=scale, counts=self._counts, slots=slots
        )
        if self._expert_scale is not None:
            flat = scale_rows(kernels, weights.view(-1, 1), self._expert_scale, ids.view(-1))
            weights = flat.view(weights.shape)
        if not self._routing.scales_input:
            return Routed(ids, weights, scale)
        # The normalised weight of a token's only expert is one.
        ones = route_experts(kernels, logits, replace(self._routing, normalized=True, scale=1.0), self._bias)[1]
        return Routed(ids, ones, scale, input_scale=weights[:, 0])


class ExpertWeights(NamedTuple):
    """The weights of some experts, or this rank's parts of all experts."""

    up: PackedExperts
    up_bias: Tensor | None
    down: PackedExperts
    down_bias: Tensor | None

    def takes_expert(self, other: ExpertWeights) -> bool:
        """See `PackedExperts.takes_expert`."""
        return self.up.takes_expert(other.up) and self.down.takes_expert(other.down)

    def copy_expert(self, index: int, other: ExpertWeights) -> None:
        """Put the only expert of `other`, which `takes_expert` accepts, in the place `index`."""
        self.up.copy_expert(index, other.up)
        self.down.copy_expert(index, other.down)
        for own, others in ((self.up_bias, other.up_bias), (self.down_bias, other.down_bias)):
            if own is not None and others is not None:
                own[index].copy_(others[0])


def load_experts(loader: LayerLoader, name: str, spec: Dense, experts: Sequence[int]) -> ExpertWeights:
    """Load the experts with these numbers of the layer `name`."""
    stage = loader.stage

    def weight_name(expert: int, part: str) -> str:
        return f"{name}.experts.{expert}.{part}.weight"

    def bias_name(expert: int, part: str) -> str:
        return f"{name}.experts.{expert}.{part}.bias"

    parts = ("gate", "up") if spec.gated else ("up",)
    # If ranks add up partial sums of the same experts, one of them adds the bias.
    adds_bias = spec.bias and (stage.splits_outputs or stage.expert_parallel or stage.group.rank == 0)
    return ExpertWeights(
        up=loader.pack_experts(experts, weight_name, parts),
        up_bias=loader.load_expert_biases(experts, bias_name, parts) if spec.bias else None,
        down=loader.pack_experts(experts, weight_name, ("down",)),
        down_bias=loader.load_expert_biases(experts, bias_name, ("down",)) if adds_bias else None,
    )


def _load_streamed(
    loader: LayerLoader, name: str, spec: Dense, experts: Sequence[int]
) -> tuple[ExpertWeights, Callable[[Tensor, int], None] | None]:
    """The experts, and what has those in memory that tokens chose; None: all of them stay there."""
    stream = loader.stage.expert_stream
    if stream is None:
        return load_experts(loader, name, spec, experts), None
    index = parse_name(f"{name}.router.weight").layer
    assert index is not None
    with stream.loading():
        weights = load_experts(loader, name, spec, experts)
    panels = weights.up.panels, weights.down.panels
    stream.keep(index, panels, weights.up.nbytes + weights.down.nbytes - sum(part.nbytes for part in panels))
    return weights, partial(stream.acquire, index)


class Experts:
    """The experts, or parts of all experts, that this rank holds."""

    def __init__(
        self,
        kernels: Kernels,
        spec: Dense,
        weights: ExpertWeights,
        first: int,
        adapters: ExpertAdapters | None,
        acquire: Callable[[Tensor, int], None] | None,
    ) -> None:
        """`first`: the place of the first of them, among those of all ranks. `adapters`: None if they have none.
        `acquire`: has those in memory that tokens chose; None: all are."""
        self._kernels = kernels
        self._acquire = acquire
        self._activation = spec.activation
        self._gated = spec.gated
        self.weights = weights
        self.first = first
        self._adapters = adapters

    def activate(self, x: Tensor, ids: Tensor, rows: Rows | None = None, compact: bool = False) -> Tensor:
        """The activations between the two products, see `expert_up`. `rows`: those whose adapters change experts."""
        if self._acquire is not None:
            self._acquire(ids, self.first)
        bias = self.weights.up_bias
        if rows is not None and self._adapters is not None:
            bias = self._adapters.up_bias(x, ids, rows, self.first, bias, compact=compact)
        return expert_up(
            self._kernels,
            x,
            ids,
            self.weights.up,
            self._activation,
            gated=self._gated,
            first_expert=self.first,
            compact=compact,
            bias=bias,
        )

    def down_bias(self, inner: Tensor, ids: Tensor, rows: Rows) -> Tensor | None:
        """What the second products of `inner` add, see `expert_down`."""
        bias = self.weights.down_bias
        return bias if self._adapters is None else self._adapters.down_bias(inner, ids, rows, self.first, bias)


class DenseBeside:
    """The norms and the dense block beside experts that read norms of their own (`MoE.own_norms`)."""

    def __init__(self, loader: LayerLoader, name: str, norm: Norm, dense: DenseFeedForward) -> None:
        self._kernels = loader.stage.kernels
        self._dense = dense
        self._router_norm, self._experts_norm, self._experts_output_norm, self._dense_output_norm = (
            NormLayer(loader, f"{name}.{part}_norm", norm)
            for part in ("router", "experts", "experts_output", "shared_output")
        )

    def expert_inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the router and of the experts, for the residual stream [T, hidden]."""
        return self._router_norm(hidden), self._experts_norm(hidden)

    def add_outputs(self, x: Tensor, routed: Tensor, rows: Rows) -> Tensor:
        """The sum of the normalised outputs of the dense block, which reads x [T, hidden], and of the experts."""
        return add(self._kernels, self._dense_output_norm(self._dense(x, rows)), self._experts_output_norm(routed))


class LatentSpace:
    """The projections into the space in which experts compute, and out of it (`MoE.latent`). Each rank has all of both,
    so that no more is exchanged than without them."""

    def __init__(self, loader: LayerLoader, name: str, shared: DenseFeedForward | None) -> None:
        self._kernels = loader.stage.kernels
        self._shared = shared
        self.down, self._up = (WholeLinear(loader, f"{name}.latent_{part}") for part in ("down", "up"))

    def add_outputs(self, x: Tensor, routed: Tensor, rows: Rows) -> Tensor:
        """The sum of the outputs of the shared block, which reads x [T, hidden], and of the experts [T, latent]."""
        output = self._up(routed, rows)
        return output if self._shared is None else add(self._kernels, output, self._shared(x, rows))


class MoEFeedForward:
    """x [T, hidden] -> [T, hidden]; input and output are whole on every rank."""

    input_form: InputForm = "tensor"
    """The router reads unquantized rows."""

    def __init__(self, loader: LayerLoader, name: str, spec: MoE) -> None:
        stage = loader.stage
        self._kernels = stage.kernels
        self._group = stage.group
        self._expert_group = stage.expert_group
        # Replicas have different tokens, so there are no partial sums to add over their ranks.
        self._partial_sums = not stage.splits_outputs and stage.expert_group.size == stage.group.size
        self._whole_experts = stage.expert_parallel and stage.expert_group.size > 1
        owns_tokens = self._whole_experts and not self._partial_sums
        self._router = Router(loader, name, spec, owns_tokens or stage.group.rank == 0)
        num_experts, held = spec.routing.num_experts, range(spec.routing.num_experts)
        self.places = ExpertPlaces(
            num_experts, num_experts + stage.redundant_experts, stage.expert_group.size, stage.device
        )
        self._own_places = self.places.spans[stage.expert_group.rank]
        if self._whole_experts:
            held = range(self._own_places.start, self._own_places.stop)
        numbers = [self.places.experts[place] for place in held]
        weights, acquire = _load_streamed(loader, name, spec.expert, numbers)
        adapters = make_expert_adapters(loader, name, spec.expert, numbers)
        self._experts = Experts(stage.kernels, spec.expert, weights, held.start, adapters, acquire)
        self._read_experts: Callable[[Sequence[int]], ExpertWeights] | None = None
        if stage.moves_experts:
            later = dataclasses.replace(loader, on_loaded=lambda num_bytes: None)
            self._read_experts = partial(load_experts, later, name, spec.expert)
        self._shared = DenseFeedForward(loader, f"{name}.shared", spec.shared) if spec.shared is not None else None
        self._beside: DenseBeside | None = None
        if spec.own_norms is not None:
            assert self._shared is not None
            self._beside, self._shared = DenseBeside(loader, name, spec.own_norms, self._shared), None
        self._latent: LatentSpace | None = None
        if spec.latent is not None:
            self._latent, self._shared = LatentSpace(loader, name, self._shared), None
        self._inner_widths = [span.size for span in split_dim(spec.expert.intermediate_size, stage.group.size)]
        self._output_widths = [
            span.size for span in split_dim(spec.expert_width(stage.spec.hidden_size), stage.group.size)
        ]

    def read_experts(self, changes: Sequence[tuple[int, int]]) -> list[tuple[int, ExpertWeights]]:
        """The experts of the (place, expert) in `changes` that come to this rank, with their indices on it.

        Raises:
            OSError: the checkpoint cannot be read.
            ValueError: the same, or it has changed.
        """
        assert self._read_experts is not None, "experts do not move"
        own, read = self._own_places, []
        for place, expert in changes:
            if own.start <= place < own.stop:
                weights = self._read_experts([expert])
                if not self._experts.weights.takes_expert(weights):
                    raise ValueError("the experts of a layer have unlike zero points")
                read.append((place - own.start, weights))
        return read

    def put_experts(self, changes: Sequence[tuple[int, int]], read: Sequence[tuple[int, ExpertWeights]]) -> None:
        """Put what `read_experts` has read in its places, between two steps. All ranks do so at the same time."""
        for index, weights in read:
            self._experts.weights.copy_expert(index, weights)
        self.places.put(changes)

    def __call__(self, x: LinearInput, rows: Rows, hidden: Tensor) -> Tensor:
        """`hidden` [T, hidden]: the residual stream; x is its norm."""
        assert isinstance(x, Tensor)
        if self._latent is not None:
            return self._latent.add_outputs(x, self._run_experts(self._latent.down(x, rows), x, rows), rows)
        if self._beside is None:
            return self._run_experts(x, x, rows)
        router_input, expert_input = self._beside.expert_inputs(hidden)
        return self._beside.add_outputs(x, self._run_experts(expert_input, router_input, rows), rows)

    def _run_experts(self, x: Tensor, router_input: Tensor, rows: Rows) -> Tensor:
        if self._partial_sums:
            return self._with_partial_sums(x, router_input, rows)
        if self._whole_experts:
            return self._with_whole_experts(x, router_input, rows)
        return self._with_split_experts(x, router_input, rows)

    def _with_split_experts(self, x: Tensor, router_input: Tensor, rows: Rows) -> Tensor:
        """Every rank computes some columns of all slots, in both products. Between the products, ranks gather the input
        of the second."""
        routed, experts = self._router(router_input, rows.padding), self._experts
        inner = experts.activate(self._expert_input(x, routed), routed.ids, rows)
        inner = self._group.all_gather_columns(inner, self._inner_widths)
        shared = self._shared.compute_columns(x, rows) if self._shared is not None else None
        local = expert_down(
            self._kernels,
            inner,
            routed.ids,
            routed.weights,
            experts.weights.down,
            shared=shared,
            shared_scale=routed.shared_scale,
            bias=experts.down_bias(inner, routed.ids, rows),
        )
        return self._group.all_gather_columns(local, self._output_widths)

    def _expert_input(self, x: Tensor, routed: Routed) -> Tensor:
        return x if routed.input_scale is None else scale_rows(self._kernels, x, routed.input_scale)

    def _with_whole_experts(self, x: Tensor, router_input: Tensor, rows: Rows) -> Tensor:
        """A replica's tokens are divided among its ranks. Each rank sends its own tokens to the ranks of their experts,
        which may be in any replica, and adds up the products that come back."""
        kernels, group, experts, bounds = self._kernels, self._expert_group, self._experts, self.places.device_bounds
        counts, token_bounds = _token_shares(rows.replicas, self._group.size)
        first = group.rank - self._group.rank
        own_counts = counts[first : first + self._group.size]
        start = sum(own_counts[: self._group.rank])
        own = slice(start, start + own_counts[self._group.rank])
        shared = self._shared(x, rows)[own] if self._shared is not None else None
        routed = self._router(router_input[own])
        if self._read_experts is not None:
            places = place_slots(kernels, routed.ids, self.places.places, self.places.copies, token_bounds[group.rank])
            routed = routed._replace(ids=places)
        ids = group.all_gather_rows(routed.ids, counts)
        exchanged = count_exchanged(kernels, ids, token_bounds, self.places.bounds)
        sent = pack_dispatch(kernels, self._expert_input(x[own], routed), routed.ids, bounds)
        tokens = group.all_to_all_rows(sent, exchanged.tokens, sum(counts))
        inner = experts.activate(tokens, ids, rows, compact=True)
        bias = experts.down_bias(inner, ids, rows)
        slots = expert_slots(kernels, inner, ids, experts.weights.down, first_expert=experts.first, bias=bias)
        products = group.all_to_all_rows(slots, exchanged.slots, routed.ids.numel())
        combined = combine_slots(
            kernels, products, routed.ids, routed.weights, bounds, shared=shared, shared_scale=routed.shared_scale
        )
        return self._group.all_gather_rows(combined, own_counts)

    def _with_partial_sums(self, x: Tensor, router_input: Tensor, rows: Rows) -> Tensor:
        """Fast numerics: ranks add up partial sums, over each rank's experts or over its part of K."""
        routed, experts = self._router(router_input, rows.padding), self._experts
        local = expert_down(
            self._kernels,
            experts.activate(self._expert_input(x, routed), routed.ids),
            routed.ids,
            routed.weights,
            experts.weights.down,
            first_expert=experts.first,
            out_dtype=torch.float32,
            bias=experts.weights.down_bias,
        )
        total = self._group.all_reduce_sum(local)
        if self._shared is not None:
            shared = self._shared(x, rows).float()
            total += shared if routed.shared_scale is None else shared * routed.shared_scale[:, None]
        return total.to(x.dtype)


@lru_cache(maxsize=256)
def _token_shares(replica_rows: tuple[int, ...], size: int) -> tuple[list[int], list[int]]:
    """(number of tokens of each rank, with `size` ranks per replica; the bounds of these token ranges, one more)."""
    counts = [span.size for num_rows in replica_rows for span in split_dim(num_rows, size)]
    return counts, [0, *itertools.accumulate(counts)]
