"""What every layer of a stage needs to take its weights and to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardline.models.parameters import is_kept_in_float32
from shardline.models.partition import ExpertShare, Span
from shardline.models.sharding import Numerics, Spans, shard
from shardline.models.spec import DecoderSpec
from shardline.runtime.finite import FiniteWatch
from shardline.runtime.loader.weights import WeightSource
from shardline.runtime.ops.grouped_weight import GroupedWeight
from shardline.runtime.ops.storage import streamed_empty
from shardline.runtime.parallel.collectives import Collectives
from shardline.runtime.quantization.base import PackedGatedLinear, PackedLinear, PackedLMHead, Quantization


@dataclass(frozen=True)
class LayerContext:
    """The model, the group that shares its layers, and where weights come from."""

    spec: DecoderSpec
    group: Collectives
    experts: Collectives
    """The ranks over which whole experts are spread; see RankGroups."""
    numerics: Numerics
    """exact: no floating-point sum crosses a rank."""
    dtype: torch.dtype
    device: torch.device
    """Where weights are kept and layers computed."""
    max_model_len: int
    quantization: Quantization
    """How linear weights are held."""
    weights: WeightSource
    watch: FiniteWatch | None
    """With `--check-finite`."""
    on_loaded: Callable[[int], None]
    """Told the bytes of each tensor that is kept."""
    expert_parallel: bool = False
    """Experts are whole, each on one rank of `experts`."""
    expert_load: Tensor | None = None
    """[num_layers, num_experts] int64: grows by the tokens that this rank counts for each expert."""
    keeps_packed: bool = False
    """Linear weights that the checkpoint has packed stay so."""
    product_shapes: set[tuple[int, int]] = field(default_factory=set)
    """[out, in] of the dense weights that were packed for layers, on this rank."""

    def spans(self, name: str) -> tuple[Span, ...]:
        """The range of the sharded dim of parameter `name` on each rank of the group."""
        spans = []
        for rank in range(self.group.size):
            sharded = [span for span in self._shard(name, rank) if span is not None]
            assert len(sharded) == 1, f"{name} is not sharded along one dim"
            spans.append(sharded[0])
        return tuple(spans)

    def load(self, name: str) -> Tensor:
        """This rank's slice of parameter `name`, contiguous, in the activations' dtype."""
        tensor = self.read(name)
        self.on_loaded(tensor.nbytes)
        if tensor.device.type == "cpu":
            return streamed_empty(tensor.shape, tensor.dtype).copy_(tensor)
        return tensor.contiguous()

    def read(self, name: str) -> Tensor:
        """As `load`, for what is packed next and not kept: perhaps a part of the mapped file, with strided rows."""
        dtype = torch.float32 if is_kept_in_float32(name) else self.dtype
        tensor = self.weights.get(name, self._shard(name, self.group.rank)).to(self.device, dtype)
        self._look_at(name, tensor)
        return tensor

    def read_linear(self, name: str) -> Tensor | GroupedWeight:
        """As `read`, for a weight that `pack` takes: as the checkpoint has packed it, where it stays so."""
        if self.keeps_packed:
            packed = self.weights.get_packed(name, self._shard(name, self.group.rank))
            if packed is not None:
                self._look_at(name, packed.scales)
                return packed.to(self.device)
        return self.read(name)

    def _look_at(self, name: str, tensor: Tensor) -> None:
        if self.watch is not None and not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"{name} holds NaN or Inf in {tensor.dtype}: the checkpoint is damaged, or needs a wider --dtype"
            )

    def _shard(self, name: str, rank: int) -> Spans:
        share = ExpertShare(self.experts.rank, self.experts.size) if self.expert_parallel else None
        return shard(name, self.spec, rank, self.group.size, self.numerics, share)

    def pack(self, *parts: Tensor | GroupedWeight) -> PackedLinear:
        """A weight of a layer, in parts [*, in] one under another, as the quantization holds it."""
        if all(isinstance(part, GroupedWeight) for part in parts):
            packed = self.quantization.pack(*parts)
        else:  # a checkpoint may leave one as it is
            dense = [part if isinstance(part, Tensor) else part.dequantized(self.dtype) for part in parts]
            self.product_shapes.add((sum(len(part) for part in dense), dense[0].shape[1]))
            packed = self.quantization.pack(*dense)
        self.on_loaded(packed.nbytes)
        return packed

    def pack_gated(self, gate: Tensor | GroupedWeight, up: Tensor | GroupedWeight) -> PackedGatedLinear:
        """Both weights [out, in] of a gated block's first half as the quantization holds them."""
        packed = self.quantization.pack_gated(gate, up)
        if isinstance(gate, Tensor):
            self.product_shapes.add((len(gate) + len(up), gate.shape[1]))
        self.on_loaded(packed.nbytes)
        return packed

    def pack_lm_head(self, weight: Tensor) -> PackedLMHead:
        """The output embedding [vocab, hidden_size] as the quantization holds it."""
        packed = self.quantization.pack_lm_head(weight)
        self.on_loaded(packed.nbytes)
        return packed
