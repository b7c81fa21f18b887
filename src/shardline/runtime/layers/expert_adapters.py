"""The adapters (LoRA) of experts: what they add to the products of rows that are sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from shardline.models.adapters import is_of_expert
from shardline.models.feed_forward import Dense
from shardline.models.parameters import kind_of, parse_name
from shardline.models.partition import Span
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.low_rank import LinearAdapters
from shardline.runtime.ops.adapters.low_rank import LowRankKernels, expert_low_rank
from shardline.runtime.step import Rows


class ExpertAdapters:
    """The adapters of the experts that this rank holds, or of its outputs of all experts.

    The weights of an adapter are one set for each expert. A row of a product, one expert that a token chose, reads the
    set of its adapter and expert. As in `LinearAdapters`, what is added is a bias of the row.
    """

    def __init__(self, loader: LayerLoader, name: str, spec: Dense, experts: Sequence[int]) -> None:
        stage, (layer, part, _) = loader.stage, parse_name(f"{name}.weight")
        assert layer is not None
        shapes = dict(stage.spec.layers[layer].parameters(stage.spec.hidden_size, num_experts=1))

        def adapters(parts: tuple[str, ...]) -> LinearAdapters | None:
            if not any(kind_of(f"{name}.experts.{own}.weight") in stage.adapters.kinds for own in parts):
                return None
            outputs, inputs = shapes[f"{part}.experts.0.{parts[0]}.weight"]
            names = [f"{name}.experts.{expert}.{own}" for expert in experts for own in parts]
            span = stage.shard(f"{names[0]}.weight", stage.group.rank)[0] or Span(0, outputs)
            return LinearAdapters(loader, names, [span] * len(names), inputs, len(experts))

        self._kernels = cast(LowRankKernels, stage.kernels)
        self._num_experts = len(experts)
        self._up = adapters(("gate", "up") if spec.gated else ("up",))
        self._down = adapters(("down",))

    def up_bias(
        self, x: Tensor, ids: Tensor, rows: Rows, first: int, bias: Tensor | None, *, compact: bool
    ) -> Tensor | None:
        """What the first products of x add for the tokens of `rows`, which chose `ids` [T, k]; `bias`: that of the
        experts, and all that is added if no adapter of the step changes experts. `first`, `compact`: see `expert_up`.
        """
        return self._bias(self._up, x, ids, rows, bias, first_expert=first, compact=compact)

    def down_bias(self, x: Tensor, ids: Tensor, rows: Rows, first: int, bias: Tensor | None) -> Tensor | None:
        """What the second products add, whose inputs x `expert_up` has returned."""
        return self._bias(self._down, x, ids, rows, bias, first_expert=first, sorted=True)

    def _bias(
        self, own: LinearAdapters | None, x: Tensor, ids: Tensor, rows: Rows, bias: Tensor | None, **options: Any
    ) -> Tensor | None:
        if own is None or rows.adapters is None or not rows.adapts_experts or not ids.numel():
            return bias
        options["scaled"] = rows.scaled
        return expert_low_rank(self._kernels, x, ids, rows.adapters, own.weights, self._num_experts, bias, **options)


def make_expert_adapters(loader: LayerLoader, name: str, spec: Dense, experts: Sequence[int]) -> ExpertAdapters | None:
    """The adapters of a layer's experts with these numbers; None: the deployment takes none of experts."""
    takes_any = any(map(is_of_expert, loader.stage.adapters.kinds))
    return ExpertAdapters(loader, name, spec, experts) if takes_any else None
