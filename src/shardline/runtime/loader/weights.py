"""Where a worker's weights come from: each rank asks for its own part of a parameter by the canonical name."""

from __future__ import annotations

import math
import mmap
from typing import Protocol

import torch

from shardline.config.engine import ModelConfig
from shardline.models.lookup import family
from shardline.models.parameters import is_kept_in_float32
from shardline.models.sharding import Spans
from shardline.models.spec import DecoderSpec, TensorSource
from shardline.runtime.loader.checkpoint import Checkpoint, TensorEntry
from shardline.runtime.loader.dummy import DeviceDummyWeights, DummyWeights
from shardline.runtime.loader.hub import ModelFiles
from shardline.runtime.ops.storage import mapped_empty

_HOST = torch.device("cpu")
_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
_STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


class WeightSource(Protocol):
    """Gives parameters by canonical name, whole or in part."""

    def get(self, name: str, spans: Spans) -> torch.Tensor:
        """The part `spans` (see `models.sharding.shard`) of parameter `name`.

        It may lie in a mapped file, unaligned and with strided rows: what is kept is copied.
        """


class CheckpointWeights:
    """Weights of a safetensors checkpoint; only the bytes asked for are read, by whoever reads the tensor.

    The file is mapped for each tensor as long as that lives, since mapped pages count as this process's memory.
    """

    def __init__(self, checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype) -> None:
        """`dtype`: type of the tensors given out.

        Raises:
            ValueError: the checkpoint has not all parameters of `spec`, in their shapes.
        """
        checkpoint.check(spec)
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._tensor_source = family(spec.model_type).tensor_source

    def get(self, name: str, spans: Spans) -> torch.Tensor:
        """See `WeightSource.get`."""
        source = self._tensor_source(name, self._spec)
        key = self._checkpoint.find(source)
        assert key is not None, f"{source.key} passed the check, but is not there"
        dtype = torch.float32 if is_kept_in_float32(name) else self._dtype
        return part_of(mapped_tensor(self._checkpoint.tensors[key]), source, spans, dtype)


def mapped_tensor(entry: TensorEntry) -> torch.Tensor:
    """A tensor of a checkpoint, in the file's own pages as long as nobody writes to it."""
    dtype, count = _STORED_DTYPES[entry.dtype], math.prod(entry.shape)
    if count == 0:
        return torch.empty(entry.shape, dtype=dtype)
    begin = entry.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with entry.file.open("rb") as file:
        size = entry.offset + entry.num_bytes - begin
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=begin)
    stored = torch.frombuffer(memory, dtype=torch.uint8, count=entry.num_bytes, offset=entry.offset - begin)
    if entry.offset % dtype.itemsize:
        stored = stored.clone()  # nothing aligns a tensor in a file
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
        # torch transposes fast what is dense and of one type.
        part = part.T.to(dtype).contiguous().T
    return mapped_empty(part.shape, dtype).copy_(part)


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
    return CheckpointWeights(Checkpoint.open(files.folder), spec, dtype)
