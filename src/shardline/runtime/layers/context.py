"""What the layers of a stage are built from: the context that they run in, and the loader of their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from shardline.deployment.deployment import NO_ADAPTERS, AdapterPlan
from shardline.kernels.contract import ComputeDevice, Kernels, LoadedProducts
from shardline.models.kv_groups import KVGroup
from shardline.models.parameters import is_kept_in_float32, kind_of, role_of
from shardline.models.partition import ExpertShare, Span
from shardline.models.sharding import Numerics, Spans, shard
from shardline.models.spec import DecoderSpec
from shardline.runtime.layers.chosen_tokens import ChosenTokens
from shardline.runtime.loader.adapters import AdaptedLinear
from shardline.runtime.loader.folded_norms import FoldedNorms
from shardline.runtime.loader.weights import WeightSource
from shardline.runtime.parallel.collectives import Collectives, SingleRank
from shardline.weights.base import PackedExperts, PackedGatedLinear, PackedLinear, Role, WeightFormat
from shardline.weights.formats.plain import PlainGatedLinear, PlainLinear
from shardline.weights.grouped import GroupedWeight


class TensorChecker(Protocol):
    """Looks at the output of each layer, see `features.finite`."""

    def begin_step(self, num_tokens: int) -> None:
        """Begin a step of `num_tokens`."""

    def check_tensor(self, place: str, x: Tensor, rows: Tensor | None = None) -> None:
        """Check `x` [R, N], computed at `place` for the tokens `rows` [R] of the step (None: for all tokens)."""


class WeightStream(Protocol):
    """Weights of layers that are read in every step."""

    def loading(self, layer: int) -> AbstractContextManager[None]:
        """Weights that are allocated meanwhile are those of a layer."""

    def acquire(self, layer: int) -> None:
        """Wait until the weights of a layer are in memory."""

    def release(self, layer: int) -> None:
        """The layer has computed: another one may take its memory."""


class ExpertStream(Protocol):
    """Experts that are read when tokens choose them."""

    def loading(self) -> AbstractContextManager[None]:
        """Weights that are allocated meanwhile are those of the experts of the layer that is kept next."""

    def keep(self, layer: int, panels: Sequence[Tensor], other_bytes: int) -> None:
        """Write the loaded weights `panels`, each [experts, ...], of a layer, whose experts have `other_bytes` more."""

    def acquire(self, layer: int, ids: Tensor, first: int) -> None:
        """Have those of the experts `ids` of a layer in memory that the rank holds, the ones from `first` on."""


Streams = tuple[WeightStream | None, ExpertStream | None]
"""What reads layers, and experts. None: they stay in memory."""


@dataclass(frozen=True)
class StageContext:
    """The model, the machine that runs its layers, and the ranks that share them."""

    spec: DecoderSpec
    kv_groups: tuple[KVGroup, ...]
    backend: ComputeDevice
    group: Collectives
    expert_group: Collectives
    """The ranks over which whole experts are distributed; see RankGroups."""
    numerics: Numerics
    """exact: no floating-point sum crosses a rank."""
    dtype: torch.dtype
    """The dtype of activations."""
    max_model_len: int
    finite_checker: TensorChecker | None
    """Set with `--check-finite`."""
    embeds: bool = False
    """Whether the last stage returns hidden states instead of logits."""
    expert_parallel: bool = False
    """Whether each expert is held whole, by one rank of `expert_group`."""
    expert_load: Tensor | None = None
    """[num_layers, num_experts] int64: this rank's token counts, which the layers increase."""
    context_group: Collectives = field(default_factory=SingleRank)
    """The ranks that share the keys of a request; consecutive ones of `group`."""
    chosen_tokens: ChosenTokens = field(default_factory=ChosenTokens)
    """Which tokens the layers attend to, if an indexer chooses them."""
    adapters: AdapterPlan = NO_ADAPTERS
    """The adapters that requests may name."""
    stream: WeightStream | None = None
    """None: every layer stays in memory."""
    expert_stream: ExpertStream | None = None
    """None: experts stay in memory as their layer does."""
    kept_layers: tuple[int, ...] = ()
    """The layers whose inputs a head reads, see `layers.kept_output`."""
    moves_experts: bool = False
    """Whether experts move between the ranks of `expert_group`."""
    redundant_experts: int = 0
    """Places of each layer for further copies of experts."""

    @property
    def kernels(self) -> Kernels:
        """The back end's kernels."""
        return self.backend.kernels

    @property
    def device(self) -> torch.device:
        """The device on which layers compute."""
        return self.backend.device

    @property
    def splits_outputs(self) -> bool:
        """Whether every linear splits its outputs; else closing linears split their inputs and add partial sums."""
        return self.numerics == "exact" or self.group.size == 1

    def spans(self, name: str) -> tuple[Span, ...]:
        """The range of the sharded dim of parameter `name` on each rank of the group."""
        spans = []
        for rank in range(self.group.size):
            sharded = [span for span in self.shard(name, rank) if span is not None]
            assert len(sharded) == 1, f"{name} is not sharded along one dim"
            spans.append(sharded[0])
        return tuple(spans)

    def shard(self, name: str, rank: int) -> Spans:
        """The part of parameter `name` that a rank of the group holds."""
        # Any whole expert may come to this rank.
        share = ExpertShare(0, 1) if self.expert_parallel else None
        return shard(name, self.spec, rank, self.group.size, self.numerics, share)


@dataclass(frozen=True)
class LayerLoader:
    """Reads this rank's part of each weight and packs it in the stage's format."""

    stage: StageContext
    source: WeightSource
    format: WeightFormat
    """The format of linear weights."""
    on_loaded: Callable[[int], None]
    """Called with the number of bytes of each tensor that is kept."""
    plain_shapes: set[tuple[int, int]] = field(default_factory=set)
    """[out_features, in_features] of the plain weights that have been packed for layers."""
    made_dense: Counter[str] = field(default_factory=Counter)
    """How many weights that the checkpoint packs have become dense, by kind, if the format keeps packed weights."""
    adapted: list[AdaptedLinear] = field(default_factory=list)
    """The linears that adapters can change."""
    scaling_slots: set[int] = field(default_factory=set)
    """The slots whose adapters have factors of outputs (DoRA)."""
    expert_slots: set[int] = field(default_factory=set)
    """The slots whose adapters change experts."""

    def load(self, name: str) -> Tensor:
        """This rank's slice of parameter `name`, contiguous, in the activations' dtype."""
        tensor = self.stage.backend.keep_weight(self.read(name))
        self.on_loaded(tensor.nbytes)
        return tensor

    def original_rows(self, name: str, spans: Spans | None = None) -> Tensor:
        """This rank's rows of the linear `name`, or these of its rows and columns, as the checkpoint has them, in the
        activations' dtype."""
        tied = name == "lm_head" and self.stage.spec.tied_embeddings
        name, source = "embed.weight" if tied else f"{name}.weight", self.source
        read = source.original if isinstance(source, FoldedNorms) else source.get
        return read(name, self._own_part(name) if spans is None else spans).to(self.stage.dtype)

    def load_rows(self, name: str) -> Callable[[Tensor], Tensor]:
        """A function that returns rows of this rank's slice of a table by their indices. The table is packed if the
        format packs it, and stays packed if the checkpoint packs it and the back end can read rows of it."""
        kernels = self.stage.kernels
        table: PackedLinear | None = None
        if self.format.packs_embedding:
            table = self.format.pack_lm_head(kernels, self.read(name))
        elif self.format.reads_packed:
            packed = self.source.get_packed(name, self._own_part(name))
            if packed is not None and self.format.keeps(kernels, [packed], "lm_head"):
                table = self.format.pack_lm_head(kernels, packed)  # type: ignore[arg-type]
        reader = None if table is None else table.row_reader(self.stage.dtype)
        if table is not None and reader is not None:
            self.on_loaded(table.nbytes)
            return reader
        return partial(torch.index_select, self.load(name), 0)

    def load_bias(self, *names: str) -> Tensor:
        """The slices of several biases, one after another."""
        return torch.cat([self.load(f"{name}.bias") for name in names])

    def read(self, name: str) -> Tensor:
        """As `load`, but for a weight that is packed next and not kept. It may be a view of the mapped file, with
        strided rows."""
        dtype = torch.float32 if is_kept_in_float32(name) else self.stage.dtype
        if self.format.reads_packed and self.source.is_packed(name):
            self.made_dense[kind_of(name)] += 1
        tensor = self.source.get(name, self._own_part(name)).to(self.stage.device, dtype)
        self._check_finite(name, tensor)
        return tensor

    def pack_linear(self, *names: str) -> PackedLinear:
        """The weights of linears that read the same rows, stacked and packed."""
        parts = self._read_linears(*(f"{name}.weight" for name in names))
        packed = self.format.pack_linear(self.stage.kernels, *parts)  # type: ignore[arg-type]
        if isinstance(packed, PlainLinear):
            self.plain_shapes.add((packed.out_features, packed.in_features))
        self.on_loaded(packed.nbytes)
        return packed

    def pack_gated(self, gate: str, up: str) -> PackedGatedLinear:
        """The gate and up weights of a gated block, packed together."""
        parts = self._read_linears(f"{gate}.weight", f"{up}.weight")
        packed = self.format.pack_gated(self.stage.kernels, *parts)  # type: ignore[arg-type]
        if isinstance(packed, PlainGatedLinear):
            self.plain_shapes.add((2 * packed.out_features, packed.in_features))
        self.on_loaded(packed.nbytes)
        return packed

    def pack_lm_head(self, name: str) -> PackedLinear:
        """The output embedding [vocab, hidden_size], packed."""
        (weight,) = self._read_linears(name, role="lm_head")
        packed = self.format.pack_lm_head(self.stage.kernels, weight)  # type: ignore[arg-type]
        self.on_loaded(packed.nbytes)
        return packed

    def pack_experts(
        self, held: Sequence[int], name: Callable[[int, str], str], parts: tuple[str, ...]
    ) -> PackedExperts:
        """The linears `parts` of every expert in `held`, packed; `name` gives the name of a weight."""
        experts: PackedExperts | None = None
        for index, expert in enumerate(held):
            weights = self._read_linears(*(name(expert, part) for part in parts), role="expert")
            if experts is None:
                experts = self.format.allocate_experts(self.stage.kernels, len(held), *weights)  # type: ignore[arg-type]
            self.format.pack_expert(self.stage.kernels, experts, index, *weights)  # type: ignore[arg-type]
            self.on_loaded(experts.nbytes // len(held))
        assert experts is not None, "every rank has at least one expert"
        return experts

    def load_expert_biases(
        self, held: Sequence[int], name: Callable[[int, str], str], parts: tuple[str, ...]
    ) -> Tensor:
        """The biases [experts, outputs] of the linears `parts`, side by side, of every expert in `held`."""
        rows = [torch.cat([self.read(name(expert, part)) for part in parts]) for expert in held]
        biases = self.stage.backend.keep_weight(torch.stack(rows))
        self.on_loaded(biases.nbytes)
        return biases

    def loaded_products(self, most_rows: int) -> LoadedProducts:
        """What the back end needs to know about the packed weights; steps have at most `most_rows` rows."""
        return LoadedProducts(
            frozenset(self.plain_shapes), most_rows, self.stage.dtype, exact=self.stage.numerics == "exact"
        )

    def _read_linears(self, *names: str, role: Role = "layer") -> list[Tensor | GroupedWeight]:
        """The parts of a weight. All or none stay packed: a checkpoint may pack only some, or in a way that the back
        end does not multiply."""
        parts, kernels = [self._read_linear(name) for name in names], self.stage.kernels
        packed = [part for part in parts if isinstance(part, GroupedWeight)]
        if len(packed) == len(parts) and self.format.keeps(kernels, packed, role):
            return parts
        self.made_dense.update(
            kind_of(name) for name, part in zip(names, parts, strict=True) if isinstance(part, GroupedWeight)
        )
        dense = [part.dequantize(self.stage.dtype) if isinstance(part, GroupedWeight) else part for part in parts]
        return [self.format.hold(kernels, part, role_of(name)) for name, part in zip(names, dense, strict=True)]

    def _read_linear(self, name: str) -> Tensor | GroupedWeight:
        if self.format.reads_packed:
            packed = self.source.get_packed(name, self._own_part(name))
            if packed is not None:
                if self.stage.finite_checker is not None:
                    packed = packed.whole()
                self._check_finite(name, packed.scales)
                return packed.to(self.stage.device)
        return self.read(name)

    def _own_part(self, name: str) -> Spans:
        return self.stage.shard(name, self.stage.group.rank)

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        if self.stage.finite_checker is not None and not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"{name} holds NaN or Inf in {tensor.dtype}: the checkpoint is damaged, or needs a wider --dtype"
            )
