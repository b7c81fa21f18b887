"""The metadata of a GGUF file, typed, and what all architectures read from it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shardline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from shardline.checkpoints.gguf.header import GGUFArray, GGUFHeader


class Metadata:
    """The metadata of one architecture, typed."""

    def __init__(self, checkpoint: GGUFCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.header: GGUFHeader = checkpoint.header
        self.architecture = checkpoint.architecture

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number. If the file has a list with a number per layer, all must be equal."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"must be a whole number, got {value!r:.40}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.integer(key, default)
        if value < 1:
            raise self.error(key, f"must be at least 1, got {value}")
        return value

    def width_per_head(self) -> int:
        """Elements of the residual stream for each head: the size of a head, unless the file states another."""
        return self.size("embedding_length") // self.size("attention.head_count")

    def num_blocks(self) -> int:
        """The number of layers. Each has tensors of its own."""
        count = self.integer("block_count")
        if not 0 < count <= len(self.checkpoint.tensors):
            raise self.error("block_count", f"is {count}, and the file has {len(self.checkpoint.tensors)} tensors")
        return count

    def layer_numbers(self, key: str) -> list[int]:
        """A whole number for each layer. If the file has one number, it is that of all layers."""
        full, count = f"{self.architecture}.{key}", self.num_blocks()
        if not isinstance(self.header.metadata.get(full), GGUFArray):
            return [self.integer(key)] * count
        numbers = self.header.numbers(full)
        if numbers is None or len(numbers) != count or numbers.dtype.kind not in "iub":
            raise self.error(key, f"must have a whole number for each of {count} layers")
        return [int(number) for number in numbers]

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.error(key, f"must be a finite number, got {value!r:.40}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r:.40}")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, got {value!r:.40}")
        return value

    def has(self, key: str) -> bool:
        """Whether the architecture's key exists."""
        return f"{self.architecture}.{key}" in self.header.metadata

    def has_tensor(self, key: str) -> bool:
        """Whether the file has a tensor of this name."""
        return key in self.checkpoint.tensors

    def last_layer_with(self, key: str) -> int:
        """The last layer that has a tensor of this name; -1: none has."""
        return max((index for index in range(self.num_blocks()) if self.has_tensor(f"blk.{index}.{key}")), default=-1)

    def factors(self, key: str) -> list[float] | None:
        """The numbers of a small F32 tensor; None: there is no such tensor."""
        tensor = self.checkpoint.tensors.get(key)
        if tensor is None:
            return None
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.num_bytes > 1 << 16:
            raise ValueError(f"{tensor.file}: {key} must be a short vector of F32, not {tensor.type.name}")
        values = np.fromfile(tensor.file, dtype="<f4", count=tensor.shape[0], offset=tensor.offset)
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise ValueError(f"{tensor.file}: {key} has values that are not positive; download the file again")
        return [float(value) for value in values]

    def _value(self, key: str, default: Any) -> Any:
        full = f"{self.architecture}.{key}"
        value = self.header.metadata.get(full, default)
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, GGUFArray):
            numbers = self.header.numbers(full)
            assert numbers is not None, "it exists"
            if len(numbers) == 0 or (numbers != numbers[0]).any():
                raise self.error(key, "differs between layers, which is not supported")
            return numbers[0].item()
        return value

    def error(self, key: str, problem: str) -> ValueError:
        """A ValueError about the architecture's key, for the caller to raise."""
        return self.header.error(f"{self.architecture}.{key}", problem)


def rounded(value: float) -> float:
    """A number that the file holds as float32, as the shortest decimal that is the same float32."""
    return float(str(np.float32(value)))


def rope_scaling(m: Metadata) -> dict[str, Any] | None:
    """The scaling of rope. Factors of each frequency, which Llama 3's files have as a tensor, are a long rope of one
    length."""
    kind = m.text("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": m.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": m.number("rope.scaling.factor")}
        for key, own in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if m.has(f"rope.scaling.{own}"):
                scaling[key] = m.number(f"rope.scaling.{own}")
        if m.has("rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = m.integer("rope.scaling.original_context_length")
        return scaling
    if kind not in ("none", "longrope"):
        raise m.header.error(f"{m.architecture}.rope.scaling.type", f"is {kind!r}, which is not supported")
    if (factors := m.factors("rope_freqs.weight")) is not None:
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    short, long = m.factors("rope_factors_short.weight"), m.factors("rope_factors_long.weight")
    if short is None or long is None:
        return None
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    if m.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = m.integer("rope.scaling.original_context_length")
    if m.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = m.number("rope.scaling.attn_factor")
    return scaling
