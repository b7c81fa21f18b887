"""W4A16: keeps the 4-bit weights of a GPTQ or AWQ checkpoint. Weights that it has not packed, the lm_head and experts
are plain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from shardline.weights.base import PackedExperts, PackedGatedLinear, PackedLinear, Role, WeightFormat
from shardline.weights.formats import plain
from shardline.weights.grouped import GroupedWeight
from shardline.weights.rows import as_tensor, check_features

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.runtime.backends.base import Kernels
    from shardline.weights.rows import LinearInput


@dataclass(frozen=True)
class W4A16Weight:
    """A weight [out_features, in_features], ready to multiply."""

    values: Tensor
    """[pairs, out_features, 32] uint8. A pair is two runs of 32 columns, each run in one group. A byte holds a column
    of the first run in its low four bits and a column of the second run in its high four bits."""
    scales: Tensor
    """[groups, out_features]"""
    zeros: Tensor
    """[groups, out_features] uint8"""
    group_size: int
    """Number of columns of a group, a multiple of 32."""
    in_features: int

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.values.nbytes + self.scales.nbytes + self.zeros.nbytes


class W4A16Kernels(Protocol):
    """What a back end offers for this format."""

    def activation_empty(self, dtype: torch.dtype, /, *sizes: int) -> Tensor: ...
    def activation(self, x: Tensor, out: Tensor, name: str, gated: bool, /) -> None: ...
    def pack_w4a16(self, parts: Sequence[GroupedWeight], /) -> W4A16Weight:
        """Pack the rows of all parts, stacked in order; all parts have the same groups of columns."""

    def linear_w4a16(
        self,
        x: Tensor,
        values: Tensor,
        scales: Tensor,
        zeros: Tensor,
        group_size: int,
        bias: Tensor | None,
        out: Tensor,
        /,
    ) -> None: ...


@dataclass(frozen=True)
class W4A16Linear(PackedLinear):
    """See `base.PackedLinear`.

    Elements of the weight are rounded to x's dtype before they are multiplied, and products are summed in fp32 in the
    order of K. So the bits are those of a plain linear with the dequantized weight.
    """

    kernels: W4A16Kernels
    weight: W4A16Weight
    out_features: int

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
        rows, weight = as_tensor(x), self.weight
        check_features(rows.shape[1], weight.in_features)
        out = self.kernels.activation_empty(out_dtype or rows.dtype, rows.shape[0], self.out_features)
        self.kernels.linear_w4a16(rows, weight.values, weight.scales, weight.zeros, weight.group_size, bias, out)
        return out


@dataclass(frozen=True)
class W4A16GatedLinear(PackedGatedLinear):
    """See `base.PackedGatedLinear`."""

    both: W4A16Linear

    @property
    def nbytes(self) -> int:
        return self.both.nbytes

    def __call__(self, x: LinearInput, bias: Tensor | None, activation: str) -> Tensor:
        product, kernels = self.both(x, bias), self.both.kernels
        out = kernels.activation_empty(product.dtype, product.shape[0], product.shape[1] // 2)
        kernels.activation(product, out, activation, True)
        return out


class Format(WeightFormat):
    """See `base.WeightFormat`. `pack_linear` and `pack_gated` also accept weights that a checkpoint has packed."""

    reads_packed = True
    gpu_capability = 0
    alternatives = "none, int8 or int4"

    @property
    def label(self) -> str:
        return f"w4a16_{self.group_size or 'rows'}"

    def is_dense(self, role: Role) -> bool:
        return role != "layer"

    def num_bytes(self, rows: int, columns: int, dtype_bytes: int, role: Role = "layer") -> int:
        if role != "layer":
            return plain.Format().num_bytes(rows, columns, dtype_bytes, role)
        groups = -(-columns // self.group_size) if self.group_size else 1
        # A group has a float16 scale, as packers write it, and a zero point.
        return rows * (columns // 2 + 3 * groups)

    def pack_linear(self, kernels: Kernels, *parts: Tensor | GroupedWeight) -> PackedLinear:
        grouped = [part for part in parts if isinstance(part, GroupedWeight)]
        if not grouped:
            return plain.Format().pack_linear(kernels, *_dense(parts))
        assert len(grouped) == len(parts), "a checkpoint packs all parts or none"
        return _packed(kernels, grouped)

    def pack_gated(
        self, kernels: Kernels, gate: Tensor | GroupedWeight, up: Tensor | GroupedWeight
    ) -> PackedGatedLinear:
        if isinstance(gate, GroupedWeight) and isinstance(up, GroupedWeight):
            return W4A16GatedLinear(_packed(kernels, [gate, up]))
        return plain.Format().pack_gated(kernels, *_dense((gate, up)))

    def pack_lm_head(self, kernels: Kernels, weight: Tensor) -> PackedLinear:
        return plain.Format().pack_lm_head(kernels, weight)

    def allocate_experts(self, kernels: Kernels, num_experts: int, *parts: Tensor) -> PackedExperts:
        return plain.Format().allocate_experts(kernels, num_experts, *parts)

    def pack_expert(self, kernels: Kernels, experts: PackedExperts, index: int, *parts: Tensor) -> None:
        plain.Format().pack_expert(kernels, experts, index, *parts)

    def multiply_reference(
        self,
        kernels: Kernels,
        x: Tensor,
        weight: Tensor | GroupedWeight,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Sums in fp64, so its bits may differ from the kernels'."""
        dense = weight.dequantize(x.dtype) if isinstance(weight, GroupedWeight) else weight
        return plain.Format().multiply_reference(kernels, x, dense, bias, out_dtype)


def _dense(parts: Sequence[Tensor | GroupedWeight]) -> list[Tensor]:
    dense = [part for part in parts if not isinstance(part, GroupedWeight)]
    assert len(dense) == len(parts), "a checkpoint packs all parts or none"
    return dense


def _packed(kernels: Kernels, parts: Sequence[GroupedWeight]) -> W4A16Linear:
    own_kernels = cast("W4A16Kernels", kernels)
    weight = own_kernels.pack_w4a16(parts)
    return W4A16Linear(own_kernels, weight, weight.scales.shape[1])
