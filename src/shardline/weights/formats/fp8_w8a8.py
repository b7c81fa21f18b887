"""W8A8 in fp8 (e4m3) on the CPU: weights as an fp8 checkpoint has them, or quantized as in `fp8`; products with them
round activations to e4m3 too.

A row of activations has one scale, or one for each group of columns if the weight has such groups, or the fixed scale
that the checkpoint names. Products of two e4m3 numbers are exact in fp32. A group's sum is multiplied by the scale of
the activations and then added like that of any packed weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from shardline.weights.base import PackedLinear, Role
from shardline.weights.formats import fp8, packed
from shardline.weights.grouped import GroupedWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardline.kernels.contract import Kernels
    from shardline.weights.formats.fp8 import Fp8Kernels


_ROWS = 256
"""Rows that are quantized at a time, since it takes several times their memory."""


class Format(packed.Format):
    """See `base.WeightFormat`. `packs_all`: the checkpoint's weights are fp8, and its other weights stay plain."""

    rounds_x: ClassVar[bool] = True
    is_for_gpus: ClassVar[bool] = False
    is_for_torch: ClassVar[bool] = False
    takes_e4m3: ClassVar[bool] = True
    alternatives: ClassVar[str] = "fp8, which rounds activations on GPUs"

    @property
    def reads_packed(self) -> bool:
        return self.packs_all

    @property
    def label(self) -> str:
        return f"fp8_w8a8_{self.group_size or 'rows'}" if self.packs_all else "fp8_w8a8"

    def is_dense(self, role: Role) -> bool:
        return False

    def num_bytes(self, rows: int, columns: int, dtype_bytes: int, role: Role = "layer") -> int:
        return super().num_bytes(rows, columns, dtype_bytes, role) if self.packs_all else rows * (columns + 4)

    def pack_lm_head(self, kernels: Kernels, weight: Tensor | GroupedWeight) -> PackedLinear:
        if self.packs_all or isinstance(weight, GroupedWeight):
            return super().pack_lm_head(kernels, weight)
        return fp8.Format().pack_lm_head(kernels, weight)

    def multiply_reference(
        self,
        kernels: Kernels,
        x: Tensor,
        weight: Tensor | GroupedWeight,
        bias: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Sums in fp64, so its bits may differ from the kernels'."""
        part = self.quantize(kernels, weight)
        if not isinstance(part, GroupedWeight):
            return super().multiply_reference(kernels, x, part, bias, out_dtype)
        dense = part.decode().double() * part.scales.double().index_select(1, part.group_of)
        product = round_rows_reference(x, part, _fp8(kernels).fp8_dtype) @ dense.T
        return (product if bias is None else product + bias.double()).to(out_dtype)

    def quantize(self, kernels: Kernels, weight: Tensor | GroupedWeight) -> Tensor | GroupedWeight:
        """Weights of a checkpoint that is not quantized become e4m3 with a scale per row."""
        return weight if self.packs_all or isinstance(weight, GroupedWeight) else _quantized(kernels, weight)


def round_rows_reference(x: Tensor, weight: GroupedWeight, fp8_dtype: torch.dtype) -> Tensor:
    """x [M, K] float64 as products with `weight` see it, in plain torch."""
    rounded = x.double()
    for group in range(weight.scales.shape[1]):
        columns = weight.group_of == group
        part = x[:, columns].float()
        magnitude = part.abs().amax(1, keepdim=True)
        is_finite = magnitude.isfinite()
        if weight.input_bound:
            magnitude = magnitude.clamp(max=weight.input_bound)
        scale, inverse = magnitude / fp8.LARGEST, magnitude.new_full((), fp8.LARGEST) / magnitude
        if weight.input_scale:
            scale = magnitude.new_full(magnitude.shape, weight.input_scale)
            inverse = magnitude.new_ones(()) / scale
        values = (part * inverse).clamp(-fp8.LARGEST, fp8.LARGEST).nan_to_num().to(fp8_dtype)
        rounded[:, columns] = values.double() * scale.double().masked_fill(~is_finite, float("nan"))
    return rounded


def _fp8(kernels: Kernels) -> Fp8Kernels:
    return cast("Fp8Kernels", kernels)


def _quantized(kernels: Kernels, weight: Tensor) -> GroupedWeight:
    """A weight [N, K] in e4m3 with one scale per row."""
    dtype = _fp8(kernels).fp8_dtype
    codes, scales = weight.new_empty(weight.shape).byte(), weight.new_empty(len(weight), 1).float()
    for start in range(0, len(weight), _ROWS):
        rows = slice(start, start + _ROWS)
        values, scales[rows, 0] = fp8.quantize_rows_fp8_reference(weight[rows], dtype)
        codes[rows] = values.view(codes.dtype)
    table = codes.new_tensor(range(256)).view(dtype).float()
    return GroupedWeight(codes, scales, codes.new_zeros(weight.shape[1]).long(), table=table, bits=8, label="fp8")
