"""Sources of a worker's weights: each rank asks for its own part of a parameter by the canonical name."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Protocol

import torch

from shardline.deployment.deployment import Deployment
from shardline.models.checkpoint import Checkpoint, TensorEntry
from shardline.models.gguf.checkpoint import GGUFCheckpoint
from shardline.models.lookup import family
from shardline.models.packed_weights import NOT_PACKED, PACKED, PackedFormat
from shardline.models.parameters import is_kept_in_float32, parameters
from shardline.models.partition import Span
from shardline.models.sharding import Spans
from shardline.models.spec import DecoderSpec, TensorSource
from shardline.runtime.loader.dummy import DeviceDummyWeights, DummyWeights
from shardline.runtime.loader.gguf import GGUFWeights
from shardline.runtime.loader.mapped_memory import mapped_empty
from shardline.runtime.loader.packed import read_packed
from shardline.weights.grouped import GroupedWeight

_STORED_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "I32": torch.int32,
    "I64": torch.int64,
}


class WeightSource(Protocol):
    """Returns parameters by canonical name, whole or in part."""

    def get(self, name: str, spans: Spans) -> torch.Tensor:
        """The part `spans` (see `models.sharding.shard`) of parameter `name`.

        The part may be a view of a mapped file, unaligned and with strided rows, so callers copy what they keep.
        """

    def get_packed(self, name: str, spans: Spans) -> GroupedWeight | None:
        """The same part in the checkpoint's packed form; None if the checkpoint has not packed it."""


class CheckpointWeights:
    """Weights of a safetensors checkpoint; only the requested bytes are read, when the tensor is read.

    The file is mapped separately for each tensor, as long as the tensor lives, since mapped pages count as this
    process's memory.
    """

    def __init__(
        self, checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype, packed: PackedFormat = NOT_PACKED
    ) -> None:
        """`dtype`: type of the returned tensors; `packed`: how the checkpoint has packed its linear weights.

        Raises:
            ValueError: the checkpoint lacks a parameter of `spec`, or one has another shape.
        """
        checkpoint.check(spec, packed)
        self._packed = packed
        self._names = frozenset(name for name, _ in parameters(spec))
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._tensor_source = family(spec.model_type).tensor_source

    def get(self, name: str, spans: Spans) -> torch.Tensor:
        """See `WeightSource.get`.

        Raises:
            ValueError: the columns of a packed weight are out of order, or it has a bias that the model lacks.
        """
        source = self._tensor_source(name, self._spec)
        key = self._checkpoint.find(source)
        dtype = torch.float32 if is_kept_in_float32(name) else self._dtype
        if key is None:
            return self._read_packed(name, source, spans).dequantize(dtype)
        return part_of(self._mapped(key), source, spans, dtype)

    def get_packed(self, name: str, spans: Spans) -> GroupedWeight | None:
        """See `WeightSource.get_packed`; raises the same errors as `get`."""
        source = self._tensor_source(name, self._spec)
        if self._checkpoint.find(source) is not None:
            return None
        return self._read_packed(name, source, spans)

    def _mapped(self, key: str) -> torch.Tensor:
        return mapped_tensor(self._checkpoint.tensors[key])

    def _read_packed(self, name: str, source: TensorSource, spans: Spans) -> GroupedWeight:
        base = self._checkpoint.find_packed(source)
        assert base is not None, f"{source.key} passed the check, but is not there"
        assert self._packed.is_packed, f"{source.key} passed the check, but is packed"
        # scales is [groups, out]; the number of input columns follows from qweight, in a way that depends on the
        # method.
        num_rows = self._checkpoint.shape(f"{base}scales")[1]
        packed_shape = self._checkpoint.shape(f"{base}qweight")
        num_columns = packed_shape[0] * (PACKED if self._packed.method == "gptq" else 1)
        self._check_order(base, num_columns)
        has_bias = f"{name.removesuffix('weight')}bias" in self._names
        if not has_bias and self._checkpoint.has(f"{base}bias") and bool(self._mapped(f"{base}bias").any()):
            raise ValueError(f"{base}bias is not zero, but the configuration has no bias in that place")
        first, count = source.rows or (0, num_rows)
        rows = spans[0] or Span(0, count)
        columns = spans[1] or Span(0, num_columns)
        rows = Span(first + rows.start, first + rows.stop)
        return read_packed(lambda part: self._mapped(f"{base}{part}"), self._packed, rows, columns)

    def _check_order(self, base: str, num_columns: int) -> None:
        """Refuse groups whose columns are not contiguous, whatever config.json says about desc_act."""
        if self._checkpoint.has(f"{base}g_idx"):
            size = self._packed.group_size or num_columns
            if not torch.equal(self._mapped(f"{base}g_idx").long(), torch.arange(num_columns) // size):
                raise ValueError(
                    f"{base}g_idx puts columns into groups out of order (desc_act), which is not supported; use a "
                    "checkpoint that was made with desc_act false"
                )


def mapped_tensor(entry: TensorEntry) -> torch.Tensor:
    """A tensor of a checkpoint, in the file's own pages until it is written to."""
    dtype, count = _STORED_DTYPES[entry.dtype], math.prod(entry.shape)
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    begin = entry.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with entry.file.open("rb") as file:
        size = entry.offset + entry.num_bytes - begin
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=begin)
    stored = torch.frombuffer(memory, dtype=torch.uint8, count=entry.num_bytes, offset=entry.offset - begin)
    if entry.offset % dtype.itemsize:
        stored = stored.clone()  # tensors in a file may be unaligned
    return stored.view(dtype).view(entry.shape)


def part_of(tensor: torch.Tensor, source: TensorSource, spans: Spans, dtype: torch.dtype) -> torch.Tensor:
    """The part `spans` of the parameter that `source` finds in `tensor`, as `dtype`; rows may be strided."""
    if source.transposed:
        tensor = tensor.T
    if source.rows is not None:
        first, count = source.rows
        tensor = tensor[first : first + count]
    part = tensor[tuple(slice(None) if span is None else slice(span.start, span.stop) for span in spans)]
    if part.dtype == dtype and (part.dim() == 1 or part.stride(-1) == 1):
        return part
    if source.transposed:
        # torch transposes fast if the tensor is dense and keeps its dtype.
        part = part.T.to(dtype).contiguous().T
    return mapped_empty(part.shape, dtype).copy_(part)


def open_weights(deployment: Deployment, drawn_on: torch.device | None = None) -> WeightSource:
    """The weights of a deployment, in its dtype.

    `drawn_on`: the device that draws random weights; None: the host draws them.

    Raises:
        ValueError: the checkpoint is corrupt or does not fit the model.
    """
    model, spec = deployment.model, deployment.spec
    dtype: torch.dtype = getattr(torch, deployment.dtype)
    if model.load_format == "dummy":
        if drawn_on is not None:
            return DeviceDummyWeights(spec, dtype, model.seed, drawn_on)
        return DummyWeights(spec, dtype, model.seed)
    if model.load_format == "gguf":
        return GGUFWeights(GGUFCheckpoint.open(Path(model.folder)), spec, dtype)
    return CheckpointWeights(Checkpoint.open(Path(model.folder)), spec, dtype, model.packed)
