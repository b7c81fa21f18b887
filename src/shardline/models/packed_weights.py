"""GPTQ and AWQ checkpoints, whose linear weights are packed in 4 bits, and how their config.json describes them.

An element of a weight [out, in] is (q - zero) * scale. Each group of `group_size` neighbours along the input dim
shares a scale and a zero point. A word of 32 bits holds eight q or eight zero points. Tensors that are not packed are
stored as in any other checkpoint. (GPTQ: Frantar et al., 2022; AWQ: Lin et al., 2023; the layouts are those of AutoGPTQ
and AutoAWQ.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from shardline.models.hf_config import HFConfig
from shardline.models.parameters import Shape
from shardline.weights.base import FormatChoice

PACKED = 8
"""Numbers per word."""

_GROUP_SIZES = (32, 64, 128)


class PackedFormat(msgspec.Struct, frozen=True):
    """How the linear weights of a checkpoint are packed."""

    method: Literal["none", "gptq", "awq"]
    """none: they are not packed. gptq packs q along the input dim, awq along the output dim. Both pack zero points
    along the output dim."""
    group_size: int = 0
    """Number of neighbours along the input dim that share a scale; 0: the whole row shares one."""
    zero_offset: int = 0
    """Number to add to a stored zero point."""

    @property
    def is_packed(self) -> bool:
        """Whether linear weights are packed."""
        return self.method != "none"

    def num_groups(self, in_features: int) -> int:
        """Number of scales per output."""
        return -(-in_features // self.group_size) if self.group_size else 1

    def shapes(self, out_features: int, in_features: int) -> Mapping[str, Shape]:
        """Shapes of the tensors that store a weight [out_features, in_features], by the last part of their names."""
        groups, words = self.num_groups(in_features), out_features // PACKED
        by_input, by_output = (in_features // PACKED, out_features), (in_features, words)
        return {
            "qweight": by_input if self.method == "gptq" else by_output,
            "qzeros": (groups, words),
            "scales": (groups, out_features),
        }

    @property
    def weight_format(self) -> FormatChoice:
        """The weight format if these weights stay packed."""
        return FormatChoice("packed", self.group_size)

    def __str__(self) -> str:
        groups = f"groups of {self.group_size}" if self.group_size else "one group a row"
        return f"{self.method}, 4 bits in {groups}"


NOT_PACKED = PackedFormat("none")


def packed_format(config: HFConfig) -> PackedFormat:
    """How a config.json says that linear weights are packed.

    Raises:
        ValueError: this way of packing is not supported. The message says what would work.
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
        raise refusal("desc_act", "must be false: groups of columns that are not neighbours")
    layout = section.text("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise refusal("checkpoint_format", f"must be gptq or gptq_v2, got {layout}")
    return PackedFormat("gptq", groups, zero_offset=1 if layout == "gptq" else 0)
