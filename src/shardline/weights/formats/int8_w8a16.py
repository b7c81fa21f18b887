"""W8A16: weights in int8 with a scale for each 32 neighbours along K. Products read activations as they are, so nothing
is lost but the weights' rounding, and many rows take longer than with `int8`. On CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, cast

from shardline.kernels.tensors import GROUP_SIZE
from shardline.weights.base import Role
from shardline.weights.formats import packed
from shardline.weights.grouped import GroupedWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.kernels.contract import Kernels


class ByteKernels(Protocol):
    """What a back end offers for this format."""

    def quantize_bytes(self, weight: Tensor, bits: int, /) -> tuple[Tensor, Tensor]:
        """(codes [N, K] uint8, scales [N, G] bfloat16) of a dense weight, with the value (code - middle) * scale, where
        the middle is 32 for 6 bits and 128 for 8. The largest magnitude of a group is middle - 1 scales, before the
        scale is rounded."""


class Format(packed.Format):
    """See `base.WeightFormat`."""

    is_for_gpus: ClassVar[bool] = False
    is_for_torch: ClassVar[bool] = False
    packs_embedding: ClassVar[bool] = True
    folds_norms: ClassVar[bool] = True

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
        return quantize_symmetric(kernels, weight, 8, self.label)

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


def quantize_symmetric(kernels: Kernels, weight: Tensor, bits: Literal[6, 8], label: str) -> GroupedWeight:
    """A dense weight in codes whose middle stands for zero, with a scale for each 32 neighbours."""
    codes, scales = cast("ByteKernels", kernels).quantize_bytes(weight, bits)
    table = scales.new_tensor(range(1 << bits)).float() - (1 << bits - 1)
    return GroupedWeight(codes, scales, group_of(codes), table=table, bits=bits, label=label)


def num_groups(columns: int) -> int:
    """Groups of a row; the last one may be smaller."""
    return -(-columns // GROUP_SIZE)


def group_of(codes: Tensor) -> Tensor:
    """[K] int64: the group of each column of codes [N, K]."""
    groups: Tensor = (codes.new_ones(codes.shape[1]).long().cumsum(0) - 1) // GROUP_SIZE
    return groups
