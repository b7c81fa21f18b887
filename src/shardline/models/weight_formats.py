"""How many bytes a linear weight takes in each quantization scheme."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WeightFormat:
    """Values of few bits with scales between them."""

    bits: int
    row_bytes: int = 4
    """Of a row's scale."""
    group_size: int | None = None
    """Neighbours along the input dim that are a group; None: the whole row."""
    group_bytes: int = 0
    """Of what a group has for itself."""
    lm_head: str | None = None
    """Name of the format of the output embedding, where it is another."""
    layers_only: bool = False
    """The output embedding and experts are held in the activations' dtype."""

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a weight [rows, columns], without padding."""
        groups = 1 if self.group_size is None else -(-columns // self.group_size)
        return rows * (columns * self.bits // 8 + groups * self.group_bytes + self.row_bytes)


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "int8": WeightFormat(bits=8),
    "int4": WeightFormat(bits=4, group_size=32, group_bytes=1, lm_head="int8"),
    "fp8": WeightFormat(bits=8, lm_head="int8"),
    # A scale in float16, as packers write it, and a zero point.
    "w4a16": WeightFormat(bits=4, row_bytes=0, group_size=128, group_bytes=3, layers_only=True),
}


WHOLE_ROWS = "rows"


def scheme_of(quantization: str) -> str:
    """The scheme of a resolved `--quantization`, which may name a group size: w4a16_128 is w4a16."""
    return quantization.partition("_")[0]


def weight_format(quantization: str, *, lm_head: bool = False, expert: bool = False) -> WeightFormat | None:
    """The format of the layers' weights in a scheme, of its lm_head or of experts; None: the activations' dtype."""
    scheme, _, group_size = quantization.partition("_")
    layers = WEIGHT_FORMATS[scheme]
    if layers.layers_only and (lm_head or expert):
        return None
    if group_size:
        layers = dataclasses.replace(layers, group_size=None if group_size == WHOLE_ROWS else int(group_size))
    return WEIGHT_FORMATS[layers.lm_head] if lm_head and layers.lm_head else layers
