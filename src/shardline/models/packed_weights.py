"""Checkpoints whose linear weights were packed in 4 bits, as their config.json describes them: GPTQ and AWQ.

Both keep a weight [out, in] as q, a scale and a zero point for each `group_size` neighbours of the input dim:
(q - zero) * scale. Words of 32 bits hold eight q or zero points. What is not packed lies beside it, as anywhere.
(GPTQ: Frantar et al., 2022; AWQ: Lin et al., 2023; the layouts are those of AutoGPTQ and AutoAWQ.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardline.models.hf_config import HFConfig
from shardline.models.parameters import Shape
from shardline.models.weight_formats import WHOLE_ROWS

PACKED = 8
"""Numbers in a word."""

_GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class PackedFormat:
    """How the linear weights of a checkpoint are packed."""

    method: Literal["gptq", "awq"]
    """gptq packs q along the input dim, awq along the output dim; both pack zero points along the output dim."""
    group_size: int | None
    """Neighbours along the input dim that share a scale; None: all."""
    zero_offset: int = 0
    """What is to be added to a stored zero point."""

    def num_groups(self, in_features: int) -> int:
        """Scales of an output."""
        return 1 if self.group_size is None else -(-in_features // self.group_size)

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
    def quantization(self) -> str:
        """The name under which these weights are held as they are, see `weight_formats`."""
        return f"w4a16_{self.group_size or WHOLE_ROWS}"

    def __str__(self) -> str:
        groups = "one group a row" if self.group_size is None else f"groups of {self.group_size}"
        return f"{self.method}, 4 bits in {groups}"


def packed_format(config: HFConfig) -> PackedFormat | None:
    """What a config.json says of its linear weights; None: they are not quantized.

    Raises:
        ValueError: they are, in a way that is not supported; the message says what would work.
    """
    if not config.has("quantization_config"):
        return None
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
    groups = None if group_size == -1 else group_size
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
