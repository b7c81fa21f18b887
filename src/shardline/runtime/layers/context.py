"""What every layer of a stage needs to take its weights and to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardline.models.partition import Span
from shardline.models.sharding import Numerics, shard
from shardline.models.spec import DecoderSpec
from shardline.runtime.loader.weights import WeightSource
from shardline.runtime.parallel.collectives import Collectives


@dataclass(frozen=True)
class LayerContext:
    """The model, the group that shares its layers, and where weights come from."""

    spec: DecoderSpec
    group: Collectives
    numerics: Numerics
    """exact: no floating-point sum crosses a rank."""
    dtype: torch.dtype
    max_model_len: int
    weights: WeightSource
    on_loaded: Callable[[int], None]
    """Told the bytes of each tensor that was loaded."""

    def spans(self, name: str) -> tuple[Span, ...]:
        """The range of the sharded dim of parameter `name` on each rank of the group."""
        spans = []
        for rank in range(self.group.size):
            sharded = [
                span for span in shard(name, self.spec, rank, self.group.size, self.numerics) if span is not None
            ]
            assert len(sharded) == 1, f"{name} is not sharded along one dim"
            spans.append(sharded[0])
        return tuple(spans)

    def load(self, name: str) -> Tensor:
        """This rank's slice of parameter `name`, contiguous, in the activations' dtype."""
        spans = shard(name, self.spec, self.group.rank, self.group.size, self.numerics)
        tensor = self.weights.get(name, spans).to(self.dtype).contiguous()
        self.on_loaded(tensor.numel() * tensor.element_size())
        return tensor
