"""Linear attention: each sequence has a state in its row of the layer's memory, which its tokens advance in turn."""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from shardline.kernels.tensors import InputForm, LinearInput, as_tensor
from shardline.models.linear_attention import LinearAttention
from shardline.models.mamba import Mamba2
from shardline.models.parts import KVDType, KVPart
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.linear import ClosingLinear, ColumnLinear
from shardline.runtime.ops.attention.delta_rule import DeltaInputs, DeltaWeights, delta_rule
from shardline.runtime.ops.attention.mamba import MambaInputs, MambaWeights, mamba
from shardline.runtime.ops.attention.rope import RotaryTables
from shardline.runtime.ops.attention.sequence_states import SequenceRows, SequenceStates
from shardline.runtime.step import Rows
from shardline.weights.base import PackedLinear
from shardline.weights.formats import plain

Spec = TypeVar("Spec", bound=LinearAttention)


class StateLayer(Generic[Spec]):
    """x [T, hidden] -> [Q, hidden]: project, advance the states, and project the Q rows that are left back."""

    parts: ClassVar[tuple[str, ...]]
    """What is projected; queries, keys and values come first."""
    small_parts: ClassVar[tuple[str, ...]] = ()
    """What is projected by weights that no format packs, a column for each value head."""

    def __init__(self, loader: LayerLoader, name: str, spec: Spec, tables: RotaryTables, kv_group: int) -> None:
        self.stage = stage = loader.stage
        self.spec = spec
        self._sizes = spec.state_sizes(stage.group.rank, stage.group.size)
        self._inputs = ColumnLinear(loader, [f"{name}.{part}" for part in self.parts], bias=False)
        self._small: PackedLinear | None = None
        if self.small_parts:
            weights = [loader.read(f"{name}.{part}.weight") for part in self.small_parts]
            self._small = plain.Format().pack_linear(stage.kernels, *weights)
            loader.on_loaded(self._small.nbytes)
        head_widths = [span.size for span in stage.spans(f"{name}.v.weight")]
        self._output = ClosingLinear(loader, f"{name}.o", head_widths, bias=False)
        self._states: SequenceStates | None = None
        self.load_weights(loader, name)

    def load_weights(self, loader: LayerLoader, name: str) -> None:
        """Load what the rule itself has of weights."""
        raise NotImplementedError

    def advance(self, qkv: Tensor, others: list[Tensor], states: SequenceStates, rows: SequenceRows) -> Tensor:
        """The outputs [T, local value heads * value dim] for what is projected; `states` advance."""
        raise NotImplementedError

    @property
    def input_form(self) -> InputForm:
        """The form in which this layer reads x best."""
        return "tensor" if self.small_parts else self._inputs.input_form

    def cache_parts(self, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """It caches nothing for each token."""
        return ()

    def bind_cache(self) -> None:
        """It has no pages."""

    def keep_states(self, max_seqs: int) -> None:
        """Allocate the memory for the states of `max_seqs` sequences."""
        sizes, empty = self._sizes, self.stage.backend.pages_empty
        self._states = SequenceStates(
            empty((max_seqs, sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim), torch.float32),
            empty((max_seqs, sizes.num_recent, sizes.num_channels), self.stage.dtype),
        )

    def __call__(self, x: LinearInput, rows: Rows, left: Rows) -> Tensor:
        assert self._states is not None
        assert rows.states is not None
        widths = [self._sizes.num_channels, *self._inputs.widths[3:]]
        qkv, *others = torch.split(self._inputs(x, rows), widths, dim=1)
        if self._small is not None:
            others += torch.chunk(self._small(as_tensor(x)), len(self.small_parts), dim=1)
        of_step = SequenceRows(rows.query_starts, rows.context_lens, rows.states)
        out = self.advance(qkv, others, self._states, of_step)
        return self._output(out if left is rows else left.take(out), left)


class DeltaRuleLayer(StateLayer[LinearAttention]):
    """See `models.linear_attention.LinearAttention`."""

    parts = ("q", "k", "v", "z")
    small_parts = ("beta", "decay")

    def load_weights(self, loader: LayerLoader, name: str) -> None:
        decay_log, decay_offset = (loader.load(f"{name}.{part}.bias") for part in ("decay_log", "decay_offset"))
        conv = load_all(loader, *(f"{name}.{part}_conv.weight" for part in "qkv"))
        self._weights = DeltaWeights(conv, decay_log, decay_offset, loader.load(f"{name}.norm.weight"))

    def advance(self, qkv: Tensor, others: list[Tensor], states: SequenceStates, rows: SequenceRows) -> Tensor:
        inputs = DeltaInputs(qkv, *others)
        return delta_rule(self.stage.kernels, inputs, self._weights, states, rows, self.spec.norm.eps)


class MambaLayer(StateLayer[Mamba2]):
    """See `models.mamba.Mamba2`."""

    parts = ("q", "k", "v", "z", "step")

    def load_weights(self, loader: LayerLoader, name: str) -> None:
        conv, bias = (
            load_all(loader, *(f"{name}.{part}_conv.{kind}" for part in "qkv"))
            if kind == "weight" or self.spec.conv_bias
            else None
            for kind in ("weight", "bias")
        )
        assert conv is not None
        decay_log, offset, skip = (loader.load(f"{name}.{part}.bias") for part in ("decay_log", "decay_offset", "skip"))
        own = loader.stage.spans(f"{name}.v.weight")[loader.stage.group.rank]  # ranks have all of a norm
        norm = loader.load(f"{name}.norm.weight")[own.start : own.stop]
        self._weights = MambaWeights(conv, bias, decay_log, offset, skip, norm)

    def advance(self, qkv: Tensor, others: list[Tensor], states: SequenceStates, rows: SequenceRows) -> Tensor:
        inputs = MambaInputs(qkv, *others)
        return mamba(self.stage.kernels, inputs, self._weights, states, rows, self.spec.norm.eps)


def load_all(loader: LayerLoader, *names: str) -> Tensor:
    """Small parameters, one after another."""
    whole = loader.stage.backend.keep_weight(torch.cat([loader.read(name) for name in names]))
    loader.on_loaded(whole.nbytes)
    return whole
