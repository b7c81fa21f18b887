"""Where a worker's weights come from: each rank asks for its own part of a parameter by the canonical name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from shardline.config.engine import ModelConfig
from shardline.models.hf_config import HFConfig
from shardline.models.lookup import family
from shardline.models.packed_weights import PACKED, PackedFormat, packed_format
from shardline.models.parameters import is_kept_in_float32, parameters
from shardline.models.partition import Span
from shardline.models.sharding import Spans
from shardline.models.spec import DecoderSpec, TensorSource
from shardline.runtime.loader.checkpoint import Checkpoint
from shardline.runtime.loader.dummy import DeviceDummyWeights, DummyWeights
from shardline.runtime.loader.hub import ModelFiles
from shardline.runtime.loader.packed import read_packed
from shardline.runtime.ops.grouped_weight import GroupedWeight
from shardline.runtime.ops.storage import streamed_empty

_HOST = torch.device("cpu")
_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
_MAPPED_BYTES = 64 << 20


class WeightSource(Protocol):
    """Gives parameters by canonical name, whole or in part."""

    def get(self, name: str, spans: Spans) -> torch.Tensor:
        """The part `spans` (see `models.sharding.shard`) of parameter `name`, in memory of its own, contiguous."""

    def get_packed(self, name: str, spans: Spans) -> GroupedWeight | None:
        """The same as a checkpoint has packed it; None: it has not."""


class CheckpointWeights:
    """Weights of a safetensors checkpoint; only the bytes asked for are read.

    Pages of a mapped file count as this process's memory until it is unmapped, beside the copies that are kept: so a
    file is opened anew every _MAPPED_BYTES.
    """

    def __init__(
        self, checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype, packed: PackedFormat | None = None
    ) -> None:
        """`dtype`: type of the tensors given out; `packed`: how the checkpoint has packed its linear weights.

        Raises:
            ValueError: the checkpoint has not all parameters of `spec`, in their shapes.
        """
        checkpoint.check(spec, packed)
        self._packed = packed
        self._names = frozenset(name for name, _ in parameters(spec))
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._tensor_source = family(spec.model_type).tensor_source
        self._handles: dict[Path, Any] = {}
        self._mapped = 0

    def get(self, name: str, spans: Spans) -> torch.Tensor:
        """See `WeightSource.get`.

        Raises:
            ValueError: a packed weight has its columns in another order, or a bias that the model does not have.
        """
        source = self._tensor_source(name, self._spec)
        key = self._checkpoint.find(source)
        dtype = torch.float32 if is_kept_in_float32(name) else self._dtype
        if key is None:
            tensor = self._read_packed(name, source, spans).dequantized(dtype)
        else:
            tensor = load_parameter(self._slice(key), source, spans, dtype)
        self._count_mapped(tensor.nbytes)
        return tensor

    def get_packed(self, name: str, spans: Spans) -> GroupedWeight | None:
        """See `WeightSource.get_packed`; raises what `get` does."""
        source = self._tensor_source(name, self._spec)
        if self._checkpoint.find(source) is not None:
            return None
        weight = self._read_packed(name, source, spans)
        self._count_mapped(weight.values.nbytes)
        return weight

    def _count_mapped(self, num_bytes: int) -> None:
        self._mapped += num_bytes
        if self._mapped > _MAPPED_BYTES:
            self._handles.clear()
            self._mapped = 0

    def _slice(self, key: str) -> Any:
        """The safetensors slice of a tensor."""
        file = self._checkpoint.tensors[key].file
        if file not in self._handles:
            self._handles[file] = safe_open(file, framework="pt")
        return self._handles[file].get_slice(key)

    def _read_packed(self, name: str, source: TensorSource, spans: Spans) -> GroupedWeight:
        base = self._checkpoint.find_packed(source)
        assert base is not None, f"{source.key} passed the check, but is not there"
        assert self._packed is not None, f"{source.key} passed the check, but is packed"
        # [groups, out] and, of either method, what tells the input's size.
        num_rows = self._checkpoint.shape(f"{base}scales")[1]
        packed_shape = self._checkpoint.shape(f"{base}qweight")
        num_columns = packed_shape[0] * (PACKED if self._packed.method == "gptq" else 1)
        self._check_order(base, num_columns)
        has_bias = f"{name.removesuffix('weight')}bias" in self._names
        if not has_bias and self._checkpoint.has(f"{base}bias") and bool(self._slice(f"{base}bias")[:].any()):
            raise ValueError(f"{base}bias is not zero, but the configuration has no bias in that place")
        first, count = source.rows or (0, num_rows)
        rows = spans[0] or Span(0, count)
        columns = spans[1] or Span(0, num_columns)
        rows = Span(first + rows.start, first + rows.stop)
        return read_packed(lambda part: self._slice(f"{base}{part}"), self._packed, rows, columns)

    def _check_order(self, base: str, num_columns: int) -> None:
        """Refuse groups of columns that do not lie together, whatever config.json says of desc_act."""
        assert self._packed is not None
        if self._checkpoint.has(f"{base}g_idx"):
            size = self._packed.group_size or num_columns
            if not torch.equal(self._slice(f"{base}g_idx")[:].long(), torch.arange(num_columns) // size):
                raise ValueError(
                    f"{base}g_idx puts columns into groups out of order (desc_act), which is not supported; use a "
                    "checkpoint that was made with desc_act false"
                )


def load_parameter(tensor: Any, source: TensorSource, spans: Spans, dtype: torch.dtype) -> torch.Tensor:
    """The part `spans` of the parameter that `source` finds in `tensor`, an open safetensors slice, as `dtype`."""
    shape: list[int] = tensor.get_shape()
    if source.transposed:
        shape = shape[::-1]
    bounds = [
        slice(0, size) if span is None else slice(span.start, span.stop)
        for size, span in zip(shape, spans, strict=True)
    ]
    if source.rows is not None:
        first, count = source.rows
        rows = Span(0, count) if spans[0] is None else spans[0]
        bounds[0] = slice(first + rows.start, first + rows.stop)
    if source.transposed:
        bounds = bounds[::-1]
    if any(bound.start == bound.stop for bound in bounds):
        part = torch.empty([bound.stop - bound.start for bound in bounds], dtype=dtype)
    else:
        part = tensor[tuple(bounds)]
    if source.transposed:
        # torch transposes fast what is dense and of one type.
        part = part.to(dtype).contiguous().T
    # A slice is a view of the mapped file, which is aligned to 8 bytes only and may change or vanish.
    return streamed_empty(part.shape, dtype).copy_(part)


def open_weights(
    files: ModelFiles, spec: DecoderSpec, model: ModelConfig, device: torch.device = _HOST
) -> WeightSource:
    """The weights that `model` asks for by its load_format, dtype ("auto": the checkpoint's) and seed, for layers on
    `device`.

    Raises:
        ValueError: the checkpoint is corrupt or does not fit `spec`.
    """
    dtype = _DTYPES[spec.dtype if model.dtype == "auto" else model.dtype]
    if model.load_format == "dummy":
        if device != _HOST:
            return DeviceDummyWeights(spec, dtype, model.seed, device)
        return DummyWeights(spec, dtype, model.seed)
    return CheckpointWeights(Checkpoint.open(files.folder), spec, dtype, packed_format(HFConfig(files.config)))
