"""The adapters (LoRA) of one linear: what they add to its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from shardline.kernels.tensors import InputForm, LinearInput, as_tensor
from shardline.models.adapters import is_adaptable
from shardline.models.parameters import expert_of, kind_of, parse_name
from shardline.models.partition import Span
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.loader.folded_norms import FoldedNorms
from shardline.runtime.ops.adapters.low_rank import LowRankKernels, low_rank
from shardline.runtime.ops.adapters.output_factors import output_factors
from shardline.runtime.step import Rows


class LinearAdapters:
    """The adapters of weights [out, in] that are stacked, for the outputs that this rank owns.

    Every rank multiplies whole rows of x with the whole of `down`, and the result with its own rows of `up`: so each
    output has one owner. What is added is the bias of the base product, which is rounded once, with the sum. DoRA
    multiplies both with a factor of each output.
    """

    def __init__(
        self,
        loader: LayerLoader,
        names: Sequence[str],
        spans: Sequence[Span],
        in_features: int,
        num_experts: int = 1,
    ) -> None:
        """`spans`: this rank's outputs of each weight. `num_experts`: the weights are those of so many experts, one
        after another, each with slots of its own."""
        stage = loader.stage
        self.names = tuple(names)
        """The linears, without `.weight`."""
        self.spans = tuple(spans)
        self.own_whole = spans[0]
        self._kernels = cast(LowRankKernels, stage.kernels)
        self._num_experts, self._num_parts = num_experts, len(names) // num_experts
        self.weights = self._kernels.low_rank_empty(
            stage.adapters.num_slots * num_experts,
            stage.adapters.max_rank,
            in_features,
            tuple(span.size for span in spans[: self._num_parts]),
            stage.dtype,
        )
        source = loader.source
        self._factors = source.column_factors(f"{names[0]}.weight") if isinstance(source, FoldedNorms) else None
        """Of the columns of `down`, as of those of the base weight."""
        self._loader = loader
        loader.adapted.append(self)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self.weights.clear(slot * self._num_experts, self._num_experts)
        self._loader.scaling_slots.discard(slot)
        self._loader.expert_slots.discard(slot)

    def put(self, slot: int, part: int, down: Tensor, up: Tensor, scale: float, magnitude: Tensor | None) -> None:
        """See `LowRankWeights.put`; `magnitude` [local outputs]: the norms of the rows of the changed weight.

        Raises:
            ValueError: a row is zero, so no factor gives it a norm.
        """
        factors, name = None, self.names[part]
        if magnitude is not None:
            base = self._loader.original_rows(name)
            factors = dora_factors(self._loader, slot, name, base, down, up, scale, magnitude)
        if expert_of(parse_name(f"{name}.weight").part) is not None:
            self._loader.expert_slots.add(slot)
        expert, part = divmod(part, self._num_parts)
        down = down if self._factors is None else down * self._factors
        self.weights.put(slot * self._num_experts + expert, part, down, up, scale, factors)

    def put_whole(self, slot: int, rows: Tensor) -> None:
        """See `AdaptedLinear.put_whole`."""
        raise AssertionError("only an embedding or lm_head is replaced")

    def bias(self, bias: Tensor | None, x: LinearInput, rows: Rows, chosen: Tensor | None = None) -> Tensor | None:
        """What the base product of x [M, in] adds: `bias`, or for a step with adapters a bias of each row, with factors
        of the sums if an adapter of the step has any. `chosen`: which of the rows x has; None: all."""
        if rows.adapters is None:
            return bias
        slots = rows.adapters if chosen is None else rows.adapters[chosen]
        return low_rank(self._kernels, as_tensor(x), slots, self.weights, bias, scaled=rows.scaled)


def dora_factors(
    loader: LayerLoader, slot: int, name: str, base: Tensor, down: Tensor, up: Tensor, scale: float, magnitude: Tensor
) -> Tensor:
    """See `output_factors`; `base`: rows of the linear `name`, whose outputs have factors in this slot from now on.

    Raises:
        ValueError: a row is zero, so no factor gives it a norm.
    """
    factors = output_factors(loader.stage.kernels, loader.stage.device, base, down, up, scale, magnitude)
    if not bool(torch.isfinite(factors).all()):
        raise ValueError(f"the adapter makes {name} zero somewhere, where DoRA divides by its norm")
    loader.scaling_slots.add(slot)
    return factors


def make_adapters(loader: LayerLoader, *names: str) -> LinearAdapters | None:
    """The adapters of stacked linears; None: the deployment takes none, or none can change these linears."""
    stage = loader.stage
    kinds = {kind_of(f"{name}.weight") for name in names}
    if kinds.isdisjoint(stage.adapters.kinds) or not all(is_adaptable(f"{name}.weight") for name in names):
        return None
    layer, part, _ = parse_name(f"{names[0]}.weight")
    assert layer is not None
    shapes = dict(stage.spec.layers[layer].parameters(stage.spec.hidden_size))
    outputs, inputs = shapes[f"{part}.weight"]
    spans = [stage.shard(f"{name}.weight", stage.group.rank)[0] or Span(0, outputs) for name in names]
    return LinearAdapters(loader, names, spans, inputs)


def form_with(adapters: LinearAdapters | None, form: InputForm) -> InputForm:
    """The form in which a linear with these adapters reads x; `form`: without them."""
    return form if adapters is None else "tensor"
