"""W4A8: weights in 4 bits with scales of two levels, activations in int8; the lm_head is int8.

32 neighbours along K share a whole number from -15 to 15 as their scale; a column has one more scale. A 4-bit value
times its group's scale fits a byte, so sums are exact, as with int8. (Scales of two levels: QServe, arXiv 2405.04532.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from shardline.kernels.tensors import GROUP_SIZE
from shardline.weights.base import Role
from shardline.weights.formats import int8_fast
from shardline.weights.rows import quantize_rows_reference
from shardline.weights.scaled import ScaledFormat, ScaledKernels

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.kernels.contract import Kernels


class Int4Kernels(Protocol):
    """What a back end offers for this format; see `WeightKernels`."""

    def int4_empty(
        self, out_features: int, in_features: int, *, gated: bool = False, num_matrices: int | None = None
    ) -> tuple[Tensor, Tensor]: ...
    def pack_int4(
        self, weight: Tensor, panels: Tensor, scales: Tensor, first: int = ..., half: int | None = ..., /
    ) -> None: ...
    def unpack_int4(self, panels: Tensor, scales: Tensor, out_features: int, /) -> tuple[Tensor, Tensor, Tensor]:
        """Values [N, K padded to whole groups or pairs of them] int8, scales of groups [N, number of groups] int8 and
        of columns [N] float32: the inverse of `pack_int4`, for its oracle."""

    def linear_int4(
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


class Format(ScaledFormat):
    """See `base.WeightFormat`."""

    gpu_cases = ("linear_int8", "linear_int4")
    label = "int4_fast"

    def num_bytes(self, rows: int, columns: int, dtype_bytes: int, role: Role = "layer") -> int:
        if role == "lm_head":
            return int8_fast.Format().num_bytes(rows, columns, dtype_bytes, role)
        return rows * (columns // 2 + -(-columns // GROUP_SIZE) + 4)

    def choose_kernels(self, kernels: Kernels) -> ScaledKernels:
        own_kernels = cast("Int4Kernels", kernels)
        return ScaledKernels(own_kernels.int4_empty, own_kernels.pack_int4, own_kernels.linear_int4)

    def pack_lm_head(self, kernels: Kernels, weight: Tensor) -> int8_fast.Int8LMHead:
        # No later layer averages out errors of the logits.
        return int8_fast.Format().pack_lm_head(kernels, weight)

    def multiply_reference(
        self, kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """Gives the same bits as the kernels, for the scales that packing found."""
        packed, own_kernels = self.pack_linear(kernels, weight).weight, cast("Int4Kernels", kernels)
        unpacked = own_kernels.unpack_int4(packed.panels, packed.scales, packed.out_features)
        return int4_reference(x, *unpacked, bias, out_dtype)


def int4_reference(
    x: Tensor,
    values: Tensor,
    group_scales: Tensor,
    column_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """x [M, K] times a weight as `Int4Kernels.unpack_int4` returns it."""
    rows = quantize_rows_reference(x)
    levels = values.long() * group_scales.long().repeat_interleave(GROUP_SIZE, dim=1)
    # A back end may hold pairs of groups; the last pair is padded with zeros.
    out = (rows.values.long() @ levels[:, : rows.values.shape[1]].T).float() * (rows.scales[:, None] * column_scales)
    return (out if bias is None else out + bias.float()).to(out_dtype)
