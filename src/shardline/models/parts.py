"""Small parts of models: number types, norms, rotary embeddings, and the shapes of parameters and caches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swish"]
"""clamped_swish is gpt-oss's gate: (clamp(up, -7, 7) + 1) * g * sigmoid(1.702 g) for g = min(gate, 7)."""
DType = Literal["float32", "bfloat16", "float16"]
KVDType = DType | Literal["int8", "float8_e4m3fn"]
"""Types of the KV cache. One-byte types have a float32 scale for each token and head (latents: for each token)."""

DTYPE_BYTES: Mapping[KVDType, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
"""Bytes per element."""

Shape = tuple[int, ...]
Parameters = Iterator[tuple[str, Shape]]
"""(canonical name within a layer, full shape) of parameters, in the order of computation."""


class Norm(msgspec.Struct, frozen=True, array_like=True):
    """RMSNorm or LayerNorm over the last dim."""

    kind: Literal["rms", "layer"]
    eps: float
    weight_offset: float = 0.0
    """Number that is added to the weight: 1.0 in Gemma."""
    bias: bool = False
    rounds_once: bool = False
    """Whether an RMSNorm's quotient is multiplied by the weight before it is rounded, as it is with an offset."""


class Rope(msgspec.Struct, frozen=True, array_like=True):
    """Rotary position embedding with its scaling folded in. It depends on the configuration, never on the length."""

    inv_freq: tuple[float, ...]
    """[rotary_dim / 2], radians per position."""
    attention_scaling: float = 1.0
    """Factor of cos and sin (YaRN's mscale)."""
    interleaved: bool = False
    """True: pairs (0,1), (2,3), ...; False: pairs (i, i + rotary_dim/2)."""


class QueryScale(msgspec.Struct, frozen=True, array_like=True):
    """A factor of queries that grows with their position: 1 + beta * ln(1 + floor((position + offset) / length))."""

    beta: float
    length: int
    offset: int = 0


class KVPart(NamedTuple):
    """One tensor of a layer's KV cache."""

    shape: Shape
    dtype: KVDType

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def linear_parameters(name: str, out_size: int, in_size: int, bias: bool = False) -> Parameters:
    """The weight [out, in] of a linear, and its bias."""
    yield f"{name}.weight", (out_size, in_size)
    if bias:
        yield f"{name}.bias", (out_size,)


def norm_parameters(name: str, norm: Norm | None, size: int) -> Parameters:
    """The weight of a norm over `size` elements, and its bias."""
    if norm is not None:
        yield f"{name}.weight", (size,)
        if norm.bias:
            yield f"{name}.bias", (size,)
