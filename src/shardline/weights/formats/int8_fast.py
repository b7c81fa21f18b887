"""W8A8: weights in int8 with one scale per output; activations are quantized to int8 row by row at run time. Large
numbers in a row cost the others their precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from shardline.kernels.tensors import QuantizedRows
from shardline.weights.base import GroupScales, PackedExperts, Role
from shardline.weights.rows import quantize_rows_reference
from shardline.weights.scaled import ScaledFormat, ScaledGatedLinear, ScaledKernels, ScaledLinear, ScaledWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.kernels.contract import Kernels
    from shardline.kernels.tensors import LinearInput
    from shardline.weights.grouped import GroupedWeight


class Int8Kernels(Protocol):
    """What a back end offers for this format; see `WeightKernels`."""

    def int8_empty(
        self, out_features: int, in_features: int, *, gated: bool = False, num_matrices: int | None = None
    ) -> tuple[Tensor, Tensor]: ...
    def pack_int8(
        self, weight: Tensor, panels: Tensor, scales: Tensor, first: int = ..., half: int | None = ..., /
    ) -> None: ...
    def keep_int8(self, codes: Tensor, panels: Tensor, half: int | None = ..., /) -> None:
        """Pack codes [N, K] uint8, which are 128 above the values of a weight; a half is as in `pack_int8`."""

    def linear_int8(
        self,
        values: Tensor,
        scales: Tensor,
        sums: Tensor,
        depth: int,
        panels: Tensor,
        column_scales: Tensor,
        bias: Tensor | None,
        out: Tensor,
        gate: str | None = ...,
        /,
    ) -> None: ...
    def linear_int8_argmax(
        self,
        x: QuantizedRows,
        panels: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        out_features: int,
        allowed: Tensor | None,
        /,
    ) -> Tensor:
        """See `PackedLinear.argmax`."""


@dataclass(frozen=True)
class Int8LMHead(ScaledLinear):
    """See `base.PackedLinear`."""

    def argmax(self, x: LinearInput, bias: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
        weight = self.weight
        rows = weight.quantize(x)
        own_kernels = cast("Int8Kernels", weight.kernels)
        return own_kernels.linear_int8_argmax(rows, weight.panels, weight.scales, bias, weight.out_features, allowed)


class Format(ScaledFormat):
    """See `base.WeightFormat`."""

    gpu_cases: ClassVar[tuple[str, ...]] = ("linear_int8",)
    label = "int8_fast"

    def num_bytes(self, rows: int, columns: int, dtype_bytes: int, role: Role = "layer") -> int:
        return rows * (columns + 4)

    def choose_kernels(self, kernels: Kernels) -> ScaledKernels:
        own_kernels = cast("Int8Kernels", kernels)
        return ScaledKernels(own_kernels.int8_empty, own_kernels.pack_int8, own_kernels.linear_int8)

    def pack_lm_head(self, kernels: Kernels, weight: Tensor) -> Int8LMHead:
        return Int8LMHead(self.pack_linear(kernels, weight).weight)

    def multiply_reference(
        self, kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """Gives the same bits as the kernels."""
        rows, (values, scales) = quantize_rows_reference(x), int8_weight_reference(weight)
        sums = rows.values[:, : rows.in_features].long() @ values.long().T
        out = sums.float() * (rows.scales[:, None] * scales)
        return (out if bias is None else out + bias.float()).to(out_dtype)


def keep_linear(kernels: Kernels, parts: Sequence[GroupedWeight]) -> Int8LMHead:
    """A weight of 8-bit integers with a scale per row, packed as the checkpoint has it; `parts` are stacked."""
    own_kernels, in_features = cast("Int8Kernels", kernels), parts[0].values.shape[1]
    out_features = sum(map(len, parts))
    panels, scales = own_kernels.int8_empty(out_features, in_features)
    _keep(own_kernels, parts, panels, scales)
    weight = ScaledWeight(kernels, own_kernels.linear_int8, panels, scales, in_features, out_features)
    return Int8LMHead(weight)


def keep_gated(kernels: Kernels, gate: GroupedWeight, up: GroupedWeight) -> ScaledGatedLinear:
    """The same for a gate and up."""
    own_kernels, (out_features, in_features) = cast("Int8Kernels", kernels), gate.values.shape
    panels, scales = own_kernels.int8_empty(out_features, in_features, gated=True)
    halves = scales.zero_().view(len(panels), 2, -1)
    for half, part in enumerate((gate, up)):
        own_kernels.keep_int8(part.values, panels, half)
        _spread(part.scales[:, 0], halves[:, half])
    weight = ScaledWeight(kernels, own_kernels.linear_int8, panels, scales, in_features, out_features)
    return ScaledGatedLinear(weight)


def allocate_kept_experts(kernels: Kernels, num_experts: int, parts: Sequence[GroupedWeight]) -> PackedExperts:
    """Memory for such weights of several experts; `parts` are those of one."""
    out_features, in_features = sum(map(len, parts)), parts[0].values.shape[1]
    panels, scales = cast("Int8Kernels", kernels).int8_empty(out_features, in_features, num_matrices=num_experts)
    return PackedExperts(panels, scales, in_features, out_features)


def keep_expert(kernels: Kernels, experts: PackedExperts, index: int, parts: Sequence[GroupedWeight]) -> None:
    """Pack the weight of expert `index` into its place."""
    assert experts.scales is not None
    assert not isinstance(experts.scales, GroupScales)
    _keep(cast("Int8Kernels", kernels), parts, experts.panels[index], experts.scales[index])


def _keep(kernels: Int8Kernels, parts: Sequence[GroupedWeight], panels: Tensor, scales: Tensor) -> None:
    # An expert's parts, or q, k and v, are small: stacking them costs little memory.
    first, rest = parts[0], parts[1:]
    codes = first.values.new_empty(sum(map(len, parts)), first.values.shape[1]) if rest else first.values
    scales.zero_()
    start = 0
    for part in parts:
        if rest:
            codes[start : start + len(part)] = part.values
        scales[start : start + len(part)] = part.scales[:, 0]
        start += len(part)
    kernels.keep_int8(codes, panels)


def _spread(rows: Tensor, panels: Tensor) -> None:
    """Copy numbers of rows to panels [num_panels, rows of a panel]."""
    whole = len(rows) // panels.shape[1]
    panels[:whole] = rows[: whole * panels.shape[1]].view(whole, panels.shape[1])
    if len(rows) % panels.shape[1]:
        panels[whole, : len(rows) % panels.shape[1]] = rows[whole * panels.shape[1] :]


def int8_weight_reference(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A quantized weight [N, K]: values [N, K] int8 and scales [N] float32."""
    magnitude = weight.float().abs().amax(1, keepdim=True)
    is_zero = magnitude < 1e-36
    inverse = (magnitude.new_full(magnitude.shape, 127) / magnitude).masked_fill(is_zero, 0.0)
    scales = (magnitude / 127).masked_fill(is_zero, 0.0)
    return (weight.float() * inverse).round().char(), scales[:, 0]
