"""Frequencies of the rotary embedding, from config.json. They follow transformers, but are fixed at the start.

In transformers, "dynamic" and "longrope" depend on the current length. Here they depend on max_model_len instead, so a
token at a position has the same rotation in every request. The arithmetic is float32, and powers are rounded once from
float64, so the frequencies are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardline.models.hf_config import MAX_INTEGER, HFConfig
from shardline.models.parts import QueryScale, Rope

_Frequencies = tuple[NDArray[np.float32], float]
_MAX_HEAD_DIM = 1 << 16
"""Many more elements than any head has. A damaged configuration may state any number, and the rope has a table."""


@dataclass(frozen=True)
class RopeConfig:
    """One set of rope parameters of a config.json."""

    section: HFConfig
    kind: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    original_max_position_embeddings: int

    @property
    def max_length(self) -> int:
        """Longest sequence that these parameters allow.

        As in vLLM, "linear" and "dynamic" multiply max_position_embeddings, and "yarn" multiplies
        original_max_position_embeddings. For other types, max_position_embeddings already includes the scaling.

        Raises:
            ValueError: it is longer than any model's.
        """
        length = self.max_position_embeddings
        if self.kind in ("linear", "dynamic"):
            length = int(self.max_position_embeddings * self.section.number("factor"))
        elif self.kind == "yarn":
            length = int(self.original_max_position_embeddings * self._factor())
        if length > MAX_INTEGER:
            raise self.section.error("factor", f"makes sequences of {length} tokens, more than {MAX_INTEGER}")
        return length

    def build(self, max_model_len: int | None) -> Rope:
        """The frequencies for sequences of up to `max_model_len` tokens. None means `max_length`.

        Raises:
            ValueError: a parameter is missing or wrong.
        """
        try:
            with np.errstate(all="raise", under="ignore"):
                inv_freq, attention_scaling = _KINDS[self.kind](self, max_model_len or self.max_length)
        except ArithmeticError as error:
            raise self.section.error("", f"has parameters that do not fit each other ({error})") from None
        return Rope(tuple(float(f) for f in inv_freq), attention_scaling)

    def query_scale(self) -> QueryScale:
        """The factor of queries that grows with their position (Mistral)."""
        return QueryScale(self.section.number("llama_4_scaling_beta"), self.original_max_position_embeddings)

    def _factor(self) -> float:
        """Scaling factor of yarn and longrope. If it is not set, it is the ratio of the two lengths."""
        ratio = self.max_position_embeddings / self.original_max_position_embeddings
        return self.section.number("factor", ratio)


def read_rope(
    config: HFConfig,
    head_dim: int,
    max_position_embeddings: int,
    *,
    default_theta: float = 10_000.0,
    section: HFConfig | None = None,
    partial: bool = False,
    aliases: dict[str, str] | None = None,
    default_original: int | None = None,
) -> RopeConfig:
    """The rope parameters of `config`, in `rope_parameters` (transformers 5) or in `rope_theta` and `rope_scaling`.

    `section` overrides the section to read. `partial` allows partial_rotary_factor. `aliases` renames rope types.
    `default_original` is the default of original_max_position_embeddings.

    Raises:
        ValueError: the rope type is unknown, or a parameter is wrong.
    """
    if section is None:
        section = config.section("rope_scaling" if config.has("rope_scaling") else "rope_parameters")
    kind = section.text("rope_type", section.text("type", "default"))
    kind = (aliases or {}).get(kind, kind)
    if kind not in _KINDS:
        raise section.error("rope_type", f"{kind!r} is not supported; supported: {', '.join(_KINDS)}")
    fraction = section.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if fraction > 1.0 or (fraction != 1.0 and not partial):
        raise section.error("partial_rotary_factor", f"{fraction} is not supported for this model type")
    rotary_dim = int(head_dim * fraction)
    _check_head_dim(section, head_dim)
    if rotary_dim % 2 or rotary_dim == 0:
        raise section.error(
            "partial_rotary_factor", f"needs an even rotary size, got {rotary_dim} (head_dim {head_dim})"
        )
    # As in transformers, a value outside the rope parameters takes precedence. phi3 has it there.
    original = section.integer("original_max_position_embeddings", default_original or max_position_embeddings)
    return RopeConfig(
        section=section,
        kind=kind,
        theta=section.number("rope_theta", config.number("rope_theta", default_theta)),
        rotary_dim=rotary_dim,
        max_position_embeddings=max_position_embeddings,
        original_max_position_embeddings=config.integer("original_max_position_embeddings", original),
    )


def rope_sections(config: HFConfig) -> tuple[HFConfig, HFConfig]:
    """The rope parameters of full layers, and of windowed ones. In older files only the full layers have a scaling."""
    sections = config.section("rope_parameters")
    full = config.section("rope_scaling") if config.has("rope_scaling") else sections.section("full_attention")
    return full, sections.section("sliding_attention")


def proportional_rope(section: HFConfig, head_dim: int, default_theta: float, default_fraction: float) -> Rope:
    """A rope with the pairs (i, i + head_dim / 2). Only the first `partial_rotary_factor` of them rotate.

    Raises:
        ValueError: a parameter is wrong.
    """
    fraction = section.number("partial_rotary_factor", default_fraction)
    _check_head_dim(section, head_dim)
    if fraction > 1.0 or head_dim % 2:
        raise section.error("partial_rotary_factor", f"{fraction} does not fit heads of {head_dim}")
    num_rotated = int(fraction * head_dim // 2)
    powers = _powers(section.number("rope_theta", default_theta), head_dim)[:num_rotated]
    inv_freq = np.float32(1.0) / powers / np.float32(section.number("factor", 1.0))
    return Rope((*(float(f) for f in inv_freq), *(0.0,) * (head_dim // 2 - num_rotated)))


def _check_head_dim(section: HFConfig, head_dim: int) -> None:
    if head_dim > _MAX_HEAD_DIM:
        raise section.error("partial_rotary_factor", f"needs heads of at most {_MAX_HEAD_DIM} elements, got {head_dim}")


def rotated_layers(config: HFConfig, num_layers: int) -> list[bool]:
    """Whether each layer has rope: the ones in no_rope_layers, or all but every no_rope_layer_interval-th layer.

    Raises:
        ValueError: no_rope_layers has no number for some layer.
    """
    given = config.values.get("no_rope_layers")
    if not given:
        interval = config.integer("no_rope_layer_interval", 4)
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(given, Sequence) or len(given) < num_layers or any(value not in (0, 1) for value in given):
        raise config.error("no_rope_layers", f"must have 0 or 1 for each of {num_layers} layers, got {given!r:.80}")
    return [bool(value) for value in given[:num_layers]]


def _powers(theta: float, rotary_dim: int) -> NDArray[np.float32]:
    """theta ** (2i / rotary_dim), [rotary_dim / 2]."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    base = float(np.float32(theta))
    return np.array([math.pow(base, float(exponent)) for exponent in exponents], dtype=np.float32)


def _default(rope: RopeConfig, length: int) -> _Frequencies:
    return np.float32(1.0) / _powers(rope.theta, rope.rotary_dim), 1.0


def _linear(rope: RopeConfig, length: int) -> _Frequencies:
    inv_freq, scaling = _default(rope, length)
    return inv_freq / np.float32(rope.section.number("factor")), scaling


def _dynamic(rope: RopeConfig, length: int) -> _Frequencies:
    dim, factor = rope.rotary_dim, rope.section.number("factor")
    if dim <= 2:
        raise rope.section.error("rope_type", f"'dynamic' needs a rotary size above 2, got {dim}")
    stretch = max(length, rope.max_position_embeddings) / rope.max_position_embeddings
    theta = rope.theta * (factor * stretch - (factor - 1)) ** (dim / (dim - 2))
    return np.float32(1.0) / _powers(theta, dim), 1.0


def _llama3(rope: RopeConfig, length: int) -> _Frequencies:
    section, original = rope.section, rope.original_max_position_embeddings
    factor = section.number("factor")
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high < low:
        raise section.error("high_freq_factor", f"must be at least low_freq_factor ({low}), got {high}")
    inv_freq, scaling = _default(rope, length)
    # torch divides a number by a tensor as the reciprocal times the number.
    wavelength = np.float32(1.0) / inv_freq * np.float32(2 * math.pi)
    smooth = (np.float32(1.0) / wavelength * np.float32(original) - np.float32(low)) / np.float32(high - low or 1.0)
    between = (1 - smooth) * inv_freq / np.float32(factor) + smooth * inv_freq
    scaled = np.where(wavelength > original / low, inv_freq / np.float32(factor), between)
    return np.where(wavelength < original / high, inv_freq, scaled).astype(np.float32), scaling


def _yarn(rope: RopeConfig, length: int) -> _Frequencies:
    section, dim, factor = rope.section, rope.rotary_dim, rope._factor()

    def boundary(rotations: float) -> float:
        """The dim that makes `rotations` full turns within the original length."""
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = boundary(section.number("beta_fast", 32.0)), boundary(section.number("beta_slow", 1.0))
    if section.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    powers = _powers(rope.theta, dim)
    extrapolated, interpolated = np.float32(1.0) / powers, np.float32(1.0) / (np.float32(factor) * powers)
    keep = 1 - ramp
    return (interpolated * (1 - keep) + extrapolated * keep).astype(np.float32), _yarn_scaling(section, factor)


def _yarn_scaling(section: HFConfig, factor: float) -> float:
    if section.has("attention_factor"):
        return section.number("attention_factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    # Some files have zeros here, which mean "not set".
    if section.values.get("mscale") and section.values.get("mscale_all_dim"):
        return mscale(section.number("mscale")) / mscale(section.number("mscale_all_dim"))
    return mscale(1.0)


def _longrope(rope: RopeConfig, length: int) -> _Frequencies:
    section, original = rope.section, rope.original_max_position_embeddings
    key = "long_factor" if length > original else "short_factor"
    factors = np.array(section.numbers(key, rope.rotary_dim // 2), dtype=np.float32)
    inv_freq = np.float32(1.0) / (factors * _powers(rope.theta, rope.rotary_dim))
    if section.has("attention_factor"):
        return inv_freq, section.number("attention_factor")
    factor = rope._factor()
    return inv_freq, math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


_KINDS: dict[str, Callable[[RopeConfig, int], _Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
