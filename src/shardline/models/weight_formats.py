"""How many bytes a linear weight takes in each quantization scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WeightFormat:
    """Values of few bits, and an fp32 scale per row."""

    bits: int
    group_size: int | None = None
    """Neighbours along the input dim that share a further scale of one byte."""
    lm_head: str | None = None
    """Name of the format of the output embedding, where it is another."""

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a weight [rows, columns], without padding."""
        groups = 0 if self.group_size is None else -(-columns // self.group_size)
        return rows * (columns * self.bits // 8 + groups + 4)


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "int8": WeightFormat(bits=8),
    "int4": WeightFormat(bits=4, group_size=32, lm_head="int8"),
    "fp8": WeightFormat(bits=8, lm_head="int8"),
}


def weight_format(quantization: str, lm_head: bool) -> WeightFormat:
    """The format of the layers' weights in a scheme, or of its lm_head."""
    layers = WEIGHT_FORMATS[quantization]
    return WEIGHT_FORMATS[layers.lm_head] if lm_head and layers.lm_head else layers
