"""Weights as the checkpoint has packed them, with activations in 16 or 32 bits; what it has not packed is plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeGuard, cast

from shardline.weights.base import PackedExperts, PackedGatedLinear, PackedLinear, Role, WeightFormat
from shardline.weights.formats import plain
from shardline.weights.grouped import GroupedWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.kernels.contract import Kernels


class GroupedKernels(Protocol):
    """What a back end offers for this format."""

    def keeps_grouped(self, parts: Sequence[GroupedWeight], role: Role, /) -> bool:
        """Whether the back end multiplies such parts of a weight without dequantizing them first."""

    def grouped_linear(self, parts: Sequence[GroupedWeight], rounds_x: bool, /) -> PackedLinear:
        """Pack the rows of all parts, stacked in order. `rounds_x`: products with e4m3 weights round x to e4m3 too."""

    def grouped_gated(self, gate: GroupedWeight, up: GroupedWeight, rounds_x: bool, /) -> PackedGatedLinear:
        """Pack the two weights of a gated feed-forward block."""

    def grouped_experts(self, num_experts: int, parts: Sequence[GroupedWeight], rounds_x: bool, /) -> PackedExperts:
        """Memory for the same linear of several experts; `parts` are those of one expert."""

    def pack_grouped_expert(self, experts: PackedExperts, index: int, parts: Sequence[GroupedWeight], /) -> None:
        """Pack the weight of expert `index` into its place."""


class Format(WeightFormat):
    """See `base.WeightFormat`. The functions that pack also accept weights that a checkpoint has packed."""

    rounds_x: ClassVar[bool] = False
    """Whether products with e4m3 weights round x to e4m3 too."""
    gpu_cases: ClassVar[tuple[str, ...]] = ("linear_w4a16",)
    alternatives = "none, int8_fast or int4_fast"

    @property
    def reads_packed(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return f"packed_{self.group_size or 'rows'}"

    def is_dense(self, role: Role) -> bool:
        return role in ("expert", "lm_head") and not self.packs_all

    def keeps(self, kernels: Kernels, parts: Sequence[GroupedWeight], role: Role) -> bool:
        return _own(kernels).keeps_grouped(parts, role)

    def num_bytes(self, rows: int, columns: int, dtype_bytes: int, role: Role = "layer") -> int:
        if self.is_dense(role):
            return plain.Format().num_bytes(rows, columns, dtype_bytes, role)
        groups = -(-columns // self.group_size) if self.group_size else 1
        return int(rows * (columns * self.bits / 8 + self.group_bytes * groups))

    def quantize(self, kernels: Kernels, weight: Tensor | GroupedWeight) -> Tensor | GroupedWeight:
        """A part of a weight as it is packed. Formats that quantize dense weights do it here, row by row."""
        return weight

    def _quantized(self, kernels: Kernels, parts: Sequence[Tensor | GroupedWeight]) -> list[Tensor | GroupedWeight]:
        return [self.quantize(kernels, part) for part in parts]

    def pack_linear(self, kernels: Kernels, *parts: Tensor | GroupedWeight) -> PackedLinear:
        held = self._quantized(kernels, parts)
        if _are_grouped(held):
            return _own(kernels).grouped_linear(held, self.rounds_x)
        return plain.Format().pack_linear(kernels, *_dense(held))

    def pack_gated(
        self, kernels: Kernels, gate: Tensor | GroupedWeight, up: Tensor | GroupedWeight
    ) -> PackedGatedLinear:
        held = self._quantized(kernels, (gate, up))
        if _are_grouped(held):
            return _own(kernels).grouped_gated(held[0], held[1], self.rounds_x)
        return plain.Format().pack_gated(kernels, *_dense(held))

    def pack_lm_head(self, kernels: Kernels, weight: Tensor | GroupedWeight) -> PackedLinear:
        held = self.quantize(kernels, weight)
        if isinstance(held, GroupedWeight):
            return _own(kernels).grouped_linear([held], self.rounds_x)
        return plain.Format().pack_lm_head(kernels, held)

    def allocate_experts(self, kernels: Kernels, num_experts: int, *parts: Tensor | GroupedWeight) -> PackedExperts:
        held = self._quantized(kernels, parts)
        if _are_grouped(held):
            return _own(kernels).grouped_experts(num_experts, held, self.rounds_x)
        return plain.Format().allocate_experts(kernels, num_experts, *_dense(held))

    def pack_expert(self, kernels: Kernels, experts: PackedExperts, index: int, *parts: Tensor | GroupedWeight) -> None:
        held = self._quantized(kernels, parts)
        if experts.scales is not None and _are_grouped(held):
            _own(kernels).pack_grouped_expert(experts, index, held)
        elif experts.scales is not None or _are_grouped(held):
            raise ValueError("the checkpoint packs only some experts of a layer; use --quantization none")
        else:
            plain.Format().pack_expert(kernels, experts, index, *_dense(held))

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


def _own(kernels: Kernels) -> GroupedKernels:
    return cast("GroupedKernels", kernels)


def _are_grouped(parts: Sequence[Tensor | GroupedWeight]) -> TypeGuard[Sequence[GroupedWeight]]:
    return all(isinstance(part, GroupedWeight) for part in parts)


def _dense(parts: Sequence[Tensor | GroupedWeight]) -> list[Tensor]:
    dense = [part for part in parts if not isinstance(part, GroupedWeight)]
    assert len(dense) == len(parts), "layers dequantize a weight whose other parts are not packed"
    return dense
