"""W8A16: weights in int8 with a scale for each 32 neighbours along K. Products read activations as they are, so nothing
is lost but the weights' rounding, and many rows take longer than with `int8`. On CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shardline.kernels.tensors import GROUP_SIZE
from shardline.weights.base import Role
from shardline.weights.formats import packed
from shardline.weights.grouped import GroupedWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.kernels.contract import Kernels

_LARGEST, _ZERO = 127, 128
_ELEMENTS_AT_ONCE = 1 << 17
"""Elements of a weight that are quantized at a time: what is computed from them stays in the cache."""


class Format(packed.Format):
    """See `base.WeightFormat`."""

    is_for_gpus: ClassVar[bool] = False
    packs_embedding: ClassVar[bool] = True

    @property
    def reads_packed(self) -> bool:
        return False

    @property
    def label(self) -> str:
        return "int8_w8a16"

    def is_dense(self, role: Role) -> bool:
        return False

    def num_bytes(self, rows: int, columns: int, dtype_bytes: int, role: Role = "layer") -> int:
        return rows * (columns + 2 * num_groups(columns))

    def quantize(self, kernels: Kernels, weight: Tensor | GroupedWeight) -> GroupedWeight:
        assert not isinstance(weight, GroupedWeight), "the format reads dense weights"
        shape = len(weight), num_groups(weight.shape[1])
        codes, scales = weight.new_empty(weight.shape).byte(), weight.new_empty(shape).bfloat16()
        for rows in row_slices(weight):
            groups = in_groups(weight[rows])
            scales[rows] = groups.abs().amax(2) / _LARGEST
            inverse = (1 / scales[rows].float()).nan_to_num(posinf=0.0)
            values = (groups * inverse[..., None]).nan_to_num().round().clamp(-_LARGEST, _LARGEST) + _ZERO
            codes[rows] = values.flatten(1)[:, : weight.shape[1]].byte()
        table = scales.new_tensor(range(256)).float() - _ZERO
        return GroupedWeight(codes, scales, group_of(codes), table=table, bits=8, label=self.label)

    def multiply_reference(
        self,
        kernels: Kernels,
        x: Tensor,
        weight: Tensor | GroupedWeight,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Sums in fp64, so its bits may differ from the kernels'."""
        held = self.quantize(kernels, weight)
        dense = held.dequantize(held.scales.float().dtype).double()
        product = x.double() @ dense.T
        return (product if bias is None else product + bias.double()).to(out_dtype)


def num_groups(columns: int) -> int:
    """Groups of a row; the last one may be smaller."""
    return -(-columns // GROUP_SIZE)


def group_of(codes: Tensor) -> Tensor:
    """[K] int64: the group of each column of codes [N, K]."""
    groups: Tensor = (codes.new_ones(codes.shape[1]).long().cumsum(0) - 1) // GROUP_SIZE
    return groups


def row_slices(weight: Tensor) -> list[slice]:
    """Slices of the rows of a weight [N, K]."""
    step = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
    return [slice(start, start + step) for start in range(0, len(weight), step)]


def in_groups(rows: Tensor) -> Tensor:
    """Rows [N, K] as groups [N, G, 32] float32. The last column fills the last group."""
    columns = rows.shape[1]
    padded = rows.new_empty(len(rows), num_groups(columns) * GROUP_SIZE).float()
    padded[:, :columns], padded[:, columns:] = rows, rows[:, -1:]
    return padded.view(len(rows), -1, GROUP_SIZE)
