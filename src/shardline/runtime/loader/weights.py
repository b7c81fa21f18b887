"""Sources of a worker's weights: each rank asks for its own part of a parameter by the canonical name."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Protocol

import torch

from shardline.checkpoints.checkpoint import Checkpoint
from shardline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from shardline.checkpoints.lookup import family
from shardline.deployment.deployment import Deployment
from shardline.kernels.memory import mapped_empty
from shardline.kernels.page_cache import copy_rows, map_part
from shardline.models.parameters import is_kept_in_float32, parameters
from shardline.models.partition import Span
from shardline.models.sharding import Spans
from shardline.models.spec import DecoderSpec, TensorSource
from shardline.models.stored_layout import StoredModule, TensorEntry
from shardline.models.stored_weights import StoredRules
from shardline.runtime.loader.dummy import DeviceDummyWeights, DummyWeights
from shardline.runtime.loader.folded_norms import FoldedNorms
from shardline.runtime.loader.gguf import GGUFWeights
from shardline.runtime.loader.slices import read_in_slices
from shardline.runtime.loader.stored import ReadTensor, is_grouped, read_flat_dense, read_stored, read_zeros
from shardline.weights.grouped import GroupedWeight

_STORED_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_CHUNK_ELEMENTS = 1 << 22
"""Elements of a quantized weight that are made dense at once: their temporary copies take about 50 MB."""


class WeightSource(Protocol):
    """Returns parameters by canonical name, whole or in part."""

    def get(self, name: str, spans: Spans) -> torch.Tensor:
        """The part `spans` (see `models.sharding.shard`) of parameter `name`.

        The part may be a view of a mapped file, unaligned and with strided rows, so callers copy what they keep.
        """

    def get_packed(self, name: str, spans: Spans) -> GroupedWeight | None:
        """The same part in the checkpoint's packed form; None if it is not packed, or in no groups of columns."""

    def is_packed(self, name: str) -> bool:
        """Whether the checkpoint stores parameter `name` quantized."""


class CheckpointWeights:
    """Weights of a safetensors checkpoint; only the requested bytes are read, when the tensor is read.

    The file is mapped separately for each tensor, as long as the tensor lives, since mapped pages count as this
    process's memory.
    """

    def __init__(
        self, checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype, rules: StoredRules | None = None
    ) -> None:
        """`dtype`: type of the returned tensors; `rules`: how config.json says that the checkpoint is quantized.

        Raises:
            ValueError: the checkpoint lacks a parameter of `spec`, or one has another shape.
        """
        self._modules = checkpoint.check(spec, rules)
        self._label = "" if rules is None else rules.method
        self._names = frozenset(name for name, _ in parameters(spec))
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._tensor_source = family(spec.model_type).tensor_source

    def get(self, name: str, spans: Spans) -> torch.Tensor:
        """See `WeightSource.get`.

        Raises:
            ValueError: a number of a quantized weight is out of range, or it has a bias that the model lacks.
        """
        source = self._place(name)
        dtype = torch.float32 if is_kept_in_float32(name) else self._dtype
        module = self._find_module(source)
        if module is not None:
            return self._dequantize(name, module, source, spans, dtype)
        key = self._checkpoint.find(source)
        assert key is not None, f"{source.key} passed the check, but is not there"
        return part_of(self._mapped(key, source), source, spans, dtype)

    def get_packed(self, name: str, spans: Spans) -> GroupedWeight | None:
        """See `WeightSource.get_packed`; raises the same errors as `get`."""
        source = self._place(name)
        module = self._find_module(source)
        if module is None or not is_grouped(module, self._reader(module, source)):
            return None
        self._check_bias(name, module)
        rows, columns = _bounds(module, source, spans)
        tensor = self._reader(module, source)
        weight = read_in_slices(
            lambda some: read_stored(module, tensor, some, columns, self._label),
            rows,
            columns.size,
            read_zeros=lambda: read_zeros(module, tensor, rows, columns),
        )
        return weight.select_rows(slice(None, None, source.row_step)) if source.row_step > 1 else weight

    def is_packed(self, name: str) -> bool:
        """See `WeightSource.is_packed`."""
        return self._find_module(self._place(name)) is not None

    def _place(self, name: str) -> TensorSource:
        return self._checkpoint.place(self._tensor_source(name, self._spec))

    def _find_module(self, source: TensorSource) -> StoredModule | None:
        keys = (key.removesuffix("weight") if key.endswith(".weight") else key for key in (source.key, *source.aliases))
        return next((self._modules[base] for base in keys if base in self._modules), None)

    def _dequantize(
        self, name: str, module: StoredModule, source: TensorSource, spans: Spans, dtype: torch.dtype
    ) -> torch.Tensor:
        """Part of a quantized weight as `dtype`, made dense some rows at a time."""
        self._check_bias(name, module)
        rows, columns = _bounds(module, source, spans)
        tensor, step = self._reader(module, source), source.row_step
        dense = mapped_empty((-(-rows.size // step), columns.size), dtype)
        chunk = max(1, _CHUNK_ELEMENTS // max(1, columns.size)) * step
        grouped = is_grouped(module, tensor)
        for start in range(rows.start, rows.stop, chunk):
            some = Span(start, min(start + chunk, rows.stop))
            if grouped:
                part = read_stored(module, tensor, some, columns, self._label).dequantize(dtype)
            else:
                part = read_flat_dense(module, tensor, some, columns)
            first = (start - rows.start) // step
            dense[first : first + chunk // step] = part[::step]
        return dense

    def _reader(self, module: StoredModule, source: TensorSource) -> ReadTensor:
        # Slices of a weight read its tensors again and again.
        @functools.cache
        def read(part: str) -> torch.Tensor | None:
            key = f"{module.base}{part}"
            if not self._checkpoint.has(key):
                return None
            return self._mapped(key, source)

        return read

    def _check_bias(self, name: str, module: StoredModule) -> None:
        """Refuse a bias that the model lacks, unless it is zero. Packers write biases of zeros."""
        has_bias = f"{name.removesuffix('weight')}bias" in self._names
        key = f"{module.base}bias"
        if not has_bias and self._checkpoint.has(key) and bool(self._mapped(key).any()):
            raise ValueError(f"{key} is not zero, but the configuration has no bias in that place")

    def _mapped(self, key: str, source: TensorSource | None = None) -> torch.Tensor:
        """A tensor, or the part of it that `source` says."""
        index = None if source is None or source.index is None else source.index[0]
        return mapped_tensor(self._checkpoint.tensors[key], index)


def _bounds(module: StoredModule, source: TensorSource, spans: Spans) -> tuple[Span, Span]:
    """Rows and columns of a stored weight that are the part `spans` of a parameter."""
    first, count = source.rows or (0, module.rows)
    left, width = source.columns or (0, module.columns)
    rows, columns, step = spans[0] or Span(0, count), spans[1] or Span(0, width), source.row_step
    # The last of rows that alternate with others is the end.
    own_rows = Span(first + rows.start * step, max(first + rows.start * step, first + rows.stop * step - step + 1))
    return own_rows, Span(left + columns.start, left + columns.stop)


def mapped_tensor(entry: TensorEntry, index: int | None = None, mapped: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor of a checkpoint, or its part [index], in the file's own pages until it is written to. `mapped`: its
    file, if that is mapped as a whole.

    Raises:
        ValueError: the file ends before the tensor does.
    """
    shape = entry.shape if index is None else entry.shape[1:]
    dtype, count = _STORED_DTYPES[entry.dtype], math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    offset = entry.offset + (index or 0) * count * dtype.itemsize
    if mapped is None:
        stored = map_part(entry.file, offset, count * dtype.itemsize)
    elif len(stored := mapped[offset : offset + count * dtype.itemsize]) < count * dtype.itemsize:
        raise ValueError(f"{entry.file} ends within a tensor; it has changed since its header was read")
    if offset % dtype.itemsize:
        stored = stored.clone()  # tensors in a file may be unaligned
    return stored.view(dtype).view(shape)


def part_of(tensor: torch.Tensor, source: TensorSource, spans: Spans, dtype: torch.dtype) -> torch.Tensor:
    """The part `spans` of the parameter that `source` finds in `tensor`, as `dtype`; rows may be strided.

    `tensor` has no dim of experts: it is that of the source's index.
    """
    if source.squeezed:
        tensor = tensor.squeeze(1)
    if source.transposed:
        tensor = tensor.T
    if source.rows is not None:
        first, count = source.rows
        tensor = tensor[first : first + count * source.row_step : source.row_step]
    if source.columns is not None:
        first, count = source.columns
        tensor = tensor[:, first : first + count]
    part = tensor[tuple(slice(None) if span is None else slice(span.start, span.stop) for span in spans)]
    if part.dtype == dtype and (part.dim() == 1 or part.stride(-1) == 1):
        return part
    if source.transposed:
        # torch transposes fast if the tensor is dense and keeps its dtype.
        part = part.T.to(dtype).contiguous().T
    return copy_rows(part, mapped_empty(part.shape, dtype))


def open_weights(deployment: Deployment, drawn_on: torch.device | None = None) -> WeightSource:
    """The weights of a deployment, in its dtype, and with norms folded if its format wants them so.

    `drawn_on`: the device that draws random weights; None: the host draws them.

    Raises:
        ValueError: the checkpoint is corrupt or does not fit the model.
    """
    source = _open_source(deployment, drawn_on)
    if not deployment.weight_format.open_format().folds_norms:
        return source
    return FoldedNorms(deployment.spec, source.get, source.is_packed)


def _open_source(deployment: Deployment, drawn_on: torch.device | None) -> WeightSource:
    model, spec = deployment.model, deployment.spec
    dtype: torch.dtype = getattr(torch, deployment.dtype)
    if model.load_format == "dummy":
        if drawn_on is not None:
            return DeviceDummyWeights(spec, dtype, model.seed, drawn_on)
        return DummyWeights(spec, dtype, model.seed)
    if model.load_format == "gguf":
        return GGUFWeights(GGUFCheckpoint.open(Path(model.folder)), spec, dtype)
    return CheckpointWeights(Checkpoint.open(Path(model.folder)), spec, dtype, model.stored)
