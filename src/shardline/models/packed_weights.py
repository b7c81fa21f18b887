"""Checkpoints whose linear weights were packed in 4 bits, as their config.json describes them: GPTQ and AWQ.

Both keep a weight [out, in] as q, a scale and a zero point for each `group_size` neighbours of the input dim:
(q - zero) * scale. Words of 32 bits hold eight q or zero points. What is not packed lies beside it, as anywhere.
(GPTQ: Frantar et al., 2022; AWQ: Lin et al., 2023; the layouts are those of AutoGPTQ and AutoAWQ.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from shardline.models.hf_config import HFConfig
from shardline.models.parameters import Shape
from shardline.weights.base import FormatChoice

PACKED = 8
"""Numbers in a word."""

_GROUP_SIZES = (32, 64, 128)


class PackedFormat(msgspec.Struct, frozen=True):
    """How the linear weights of a checkpoint are packed."""

    method: Literal["none", "gptq", "awq"]
    """none: they are not. gptq packs q along the input dim, awq along the output dim; both pack zero points along the
    output dim."""
    group_size: int = 0
    """Neighbours along the input dim that share a scale; 0: the whole row."""
    zero_offset: int = 0
    """What is to be added to a stored zero point."""

    @property
    def is_packed(self) -> bool:
        """Whether linear weights are packed at all."""
        return self.method != "none"

    def num_groups(self, in_features: int) -> int:
        """Scales of an output."""
        return -(-in_features // self.group_size) if self.group_size else 1

    def shapes(self, out_features: int, in_features: int) -> Mapping[str, Shape]:
        """The tensors that stand for a weight [out_features, in_features], by their names' last part."""
        groups, words = self.num_groups(in_features), out_features // PACKED
        by_input, by_output = (in_features // PACKED, out_features), (in_features, words)
        return {
            "qweight": by_input if self.method == "gptq" else by_output,
            "qzeros": (groups, words),
            "scales": (groups, out_features),
        }

    @property
    def weight_format(self) -> FormatChoice:
        """The format in which these weights are held if they stay packed."""
        return FormatChoice("w4a16", self.group_size)

    def __str__(self) -> str:
        groups = f"groups of {self.group_size}" if self.group_size else "one group a row"
        return f"{self.method}, 4 bits in {groups}"


NOT_PACKED = PackedFormat("none")


def packed_format(config: HFConfig) -> PackedFormat:
    """What a config.json says of its linear weights.

    Raises:
        ValueError: they are, in a way that is not supported; the message says what would work.
    """
    if not config.has("quantization_config"):
        return NOT_PACKED
    section = config.section("quantization_config")
    method = section.text("quant_method", "unknown method")

    def refusal(key: str, problem: str) -> ValueError:
        return section.error(
            key, f"{problem} ({method}): not supported; use the unquantized checkpoint, with --quantization if need be"
        )

    if method not in ("gptq", "awq"):
        raise refusal("quant_method", "must be gptq or awq")
    if (bits := section.integer("bits")) != 4:
        raise refusal("bits", f"must be 4, got {bits}")
    group_size = section.integer("group_size", minimum=-1)
    if group_size not in (*_GROUP_SIZES, -1):
        raise refusal("group_size", f"must be 32, 64, 128 or -1, got {group_size}")
    groups = max(group_size, 0)
    if method == "awq":
        if (version := section.text("version", "gemm").lower()) != "gemm":
            raise refusal("version", f"must be gemm, got {version}")
        if not section.flag("zero_point", True):
            raise refusal("zero_point", "must be true")
        return PackedFormat("awq", groups)
    if section.flag("desc_act", False):
        raise refusal("desc_act", "must be false: groups of columns that do not lie together")
    layout = section.text("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise refusal("checkpoint_format", f"must be gptq or gptq_v2, got {layout}")
    return PackedFormat("gptq", groups, zero_offset=1 if layout == "gptq" else 0)
