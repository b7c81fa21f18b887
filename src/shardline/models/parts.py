"""What all parts of models can be asked, and small parts: norms, rotary embeddings, shapes of parameters and caches."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec
from msgspec.structs import FieldInfo, replace

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swish"]
"""relu2 is max(x, 0)^2. clamped_swish is gpt-oss's gate:
(clamp(up, -7, 7) + 1) * g * sigmoid(1.702 g) for g = min(gate, 7)."""
DType = Literal["float32", "bfloat16", "float16"]
KVDType = DType | Literal["int8", "float8_e4m3fn"]
"""Types of the KV cache. One-byte types have a float32 scale for each token and head (latents: for each token)."""

DTYPE_BYTES: Mapping[KVDType, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
"""Bytes per element."""

Shape = tuple[int, ...]
Parameters = Iterator[tuple[str, Shape]]
"""(canonical name within a layer, full shape) of parameters, in the order of computation."""

_fields_of = functools.cache(msgspec.structs.fields)  # it evaluates the annotations of a class at each call

AnyPart = TypeVar("AnyPart", bound="Part")


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A part of a model. It may have parts itself, among them traits."""

    words: ClassVar[Mapping[str, str]] = {}
    """What messages say of a field that is set and that a back end does not support. They name another one as it is."""

    def changed(self: AnyPart, **values: Any) -> AnyPart:
        """The same part with other `values` of its own fields and of its traits' fields, by their names."""
        changes: dict[str, Any] = {}
        for name in self.__struct_fields__:
            part = getattr(self, name)
            names = part.__struct_fields__ if isinstance(part, Trait) else ()
            if own := {name: values.pop(name) for name in names if name in values}:
                changes[name] = replace(part, **own)
        return replace(self, **changes, **values)

    def all_fields(self) -> Iterator[tuple[FieldInfo, Any]]:
        """Its fields with their values. The fields of a trait stand in its place."""
        for field in _fields_of(type(self)):
            value = getattr(self, field.name)
            if isinstance(value, Trait):
                yield from value.all_fields()
            else:
                yield field, value

    def norm_of(self, part: str) -> Norm | None:
        """The norm whose weights have the name `part`; None: there is none. Norms of a block are alike."""
        return next((value for _, value in self.all_fields() if isinstance(value, Norm)), None)

    def special_needs(self) -> Iterator[tuple[str, str]]:
        """(name, words for messages) of what a back end must support beside the fields that are set."""
        yield from ()

    def missing(self, supported: Mapping[str, str]) -> Iterator[str]:
        """What a back end lacks for this part and for the parts in it, in words.

        `supported` has the kinds of parts that it computes, and for each of them the fields that may differ from their
        defaults and the special needs. So what is new is missing until a back end lists it.
        """
        kind = type(self).__name__
        if kind not in supported:
            yield kind
            return
        names = supported[kind].split()
        for field in _fields_of(type(self)):
            value = getattr(self, field.name)
            is_set = field.default is not msgspec.NODEFAULT and value != field.default
            if is_set and field.name not in names and not isinstance(value, Trait):
                yield self.words.get(field.name, f"{kind}.{field.name}")
            elif isinstance(value, Part):
                yield from value.missing(supported)
        yield from (words for name, words in self.special_needs() if name not in names)


class Trait(Part, frozen=True, array_like=True):
    """What belongs to one kind of part. No two traits of a kind, and not the kind itself, have a field of one name."""


class Norm(Part, frozen=True, array_like=True):
    """RMSNorm or LayerNorm over the last dim."""

    words: ClassVar[Mapping[str, str]] = {"rounds_once": "norm that rounds once"}

    kind: Literal["rms", "layer"]
    eps: float
    weight_offset: float = 0.0
    """Number that is added to the weight: 1.0 in Gemma."""
    bias: bool = False
    rounds_once: bool = False
    """Whether an RMSNorm's quotient is multiplied by the weight before it is rounded, as it is with an offset."""

    @property
    def kernel_offset(self) -> float:
        """What kernels add to the weight. They round a quotient first only if this is zero, and 1e-30 changes none."""
        return self.weight_offset or (1e-30 if self.rounds_once else 0.0)


class Rope(Part, frozen=True, array_like=True):
    """Rotary position embedding with its scaling folded in. It depends on the configuration, never on the length."""

    inv_freq: tuple[float, ...]
    """[rotary_dim / 2], radians per position."""
    attention_scaling: float = 1.0
    """Factor of cos and sin (YaRN's mscale)."""
    interleaved: bool = False
    """True: pairs (0,1), (2,3), ...; False: pairs (i, i + rotary_dim/2)."""


class QueryScale(Part, frozen=True, array_like=True):
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
