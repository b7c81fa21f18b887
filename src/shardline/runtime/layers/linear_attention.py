"""Linear attention: each sequence has a state in its row of the layer's memory, which its tokens advance in turn."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.kernels.tensors import InputForm, LinearInput
from shardline.models.linear_attention import LinearAttention
from shardline.models.parts import KVDType, KVPart
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.linear import ClosingLinear, ColumnLinear
from shardline.runtime.ops.attention.delta_rule import DeltaInputs, DeltaRows, DeltaStates, DeltaWeights, delta_rule
from shardline.runtime.ops.attention.rope import RotaryTables
from shardline.runtime.step import Rows

_PARTS = ("q", "k", "v", "z", "beta", "decay")


class LinearAttentionLayer:
    """x [T, hidden] -> [Q, hidden]: project, advance the states, and project the Q rows that are left back."""

    def __init__(
        self, loader: LayerLoader, name: str, spec: LinearAttention, tables: RotaryTables, kv_group: int
    ) -> None:
        self._stage = stage = loader.stage
        self._sizes = spec.state_sizes(stage.group.rank, stage.group.size)
        self._eps = spec.norm.eps
        self._inputs = ColumnLinear(loader, [f"{name}.{part}" for part in _PARTS], bias=False)
        conv = torch.cat([loader.read(f"{name}.{part}_conv.weight") for part in "qkv"]).float()
        loader.on_loaded(conv.numel() * stage.dtype.itemsize)  # as many as are planned
        decay_log, decay_offset = (loader.load(f"{name}.{part}.bias") for part in ("decay_log", "decay_offset"))
        self._weights = DeltaWeights(conv, decay_log, decay_offset, loader.load(f"{name}.norm.weight"))
        head_widths = [span.size for span in stage.spans(f"{name}.v.weight")]
        self._output = ClosingLinear(loader, f"{name}.o", head_widths, bias=False)
        self._states: DeltaStates | None = None

    @property
    def input_form(self) -> InputForm:
        """The form in which this layer reads x best."""
        return self._inputs.input_form

    def cache_parts(self, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """It caches nothing for each token."""
        return ()

    def bind_cache(self) -> None:
        """It has no pages."""

    def keep_states(self, max_seqs: int) -> None:
        """Allocate the memory for the states of `max_seqs` sequences."""
        sizes, empty = self._sizes, self._stage.backend.pages_empty
        self._states = DeltaStates(
            empty((max_seqs, sizes.num_value_heads, sizes.key_head_dim, sizes.value_head_dim), torch.float32),
            empty((max_seqs, sizes.num_recent, sizes.num_channels), self._stage.dtype),
        )

    def __call__(self, x: LinearInput, rows: Rows, left: Rows) -> Tensor:
        assert self._states is not None
        assert rows.states is not None
        qkv, *others = torch.split(self._inputs(x, rows), self._widths, dim=1)
        of_step = DeltaRows(rows.query_starts, rows.context_lens, rows.states)
        inputs = DeltaInputs(qkv, *others)
        out = delta_rule(self._stage.kernels, inputs, self._weights, self._states, of_step, self._eps)
        return self._output(out if left is rows else left.take(out), left)

    @property
    def _widths(self) -> list[int]:
        """Columns of queries, keys and values together, and of each further part."""
        return [self._sizes.num_channels, *self._inputs.widths[3:]]
