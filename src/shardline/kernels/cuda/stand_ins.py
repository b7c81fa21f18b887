"""torch's kernels in place of Triton's, on weights and quantized rows as this back end holds them (`weights.py`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.cuda.weights import RowKernels
from shardline.kernels.tensors import RowBias
from shardline.kernels.torch.elementwise import activation
from shardline.kernels.torch.formats import multiply_bytes
from shardline.kernels.torch.linear import COLUMNS, split_bias
from shardline.kernels.torch.torch_kernels import TorchKernels
from shardline.weights.formats.fp8 import quantize_rows_fp8_reference
from shardline.weights.rows import quantize_rows_reference


class StandIns(TorchKernels):
    """See `contract.Kernels`. Weights are rows [.., out_features, in_features]."""

    def weight_empty(
        self,
        dtype: torch.dtype,
        out_features: int,
        in_features: int,
        *,
        gated: bool = False,
        num_matrices: int | None = None,
    ) -> Tensor:
        leading = () if num_matrices is None else (num_matrices,)
        rows = 2 * out_features if gated else out_features
        return torch.empty(*leading, rows, in_features, dtype=dtype, device=self.device)

    pack_weight = staticmethod(RowKernels.pack_weight)
    unpack_int4 = staticmethod(RowKernels.unpack_int4)

    def multiply(self, x: Tensor, tiles: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x [M, K] times the transpose of rows [N, K], plus bias: [M, N], see `DenseKernels.multiply`. The last rows
        are copied to a tile of their own."""
        num_rows, depth = tiles.shape
        whole = num_rows - num_rows % COLUMNS
        parts = []
        if whole:
            own = None if bias is None else bias[:whole]
            parts.append(super().multiply(x, tiles[:whole].view(-1, COLUMNS, depth), own, dtype))
        if whole < num_rows:
            last = torch.zeros(1, COLUMNS, depth * tiles.itemsize, dtype=torch.uint8, device=x.device).view(tiles.dtype)
            last[0, : num_rows - whole] = tiles[whole:]
            own = None if bias is None else bias[whole:]
            parts.append(super().multiply(x, last, own, dtype)[:, : num_rows - whole])
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def linear(
        self, x: Tensor, panels: Tensor, bias: Tensor | RowBias | None, out: Tensor, gate: str | None = None
    ) -> None:
        bias, change = split_bias(bias)
        if gate is None:
            out.copy_(change(self.multiply(x, panels, bias, out.dtype)))
        else:
            activation(change(self.multiply(x, panels, bias, x.dtype)), out, gate, True)

    def linear_int4(
        self,
        values: Tensor,
        scales: Tensor,
        sums: Tensor,
        depth: int,
        panels: Tensor,
        column_scales: Tensor,
        bias: Tensor | RowBias | None,
        out: Tensor,
        gate: str | None = None,
    ) -> None:
        weight = _bytes_of_int4(panels, column_scales, values.shape[1])
        self.linear_int8(values, scales, sums, depth, weight, column_scales, bias, out, gate)

    def linear_fp8(
        self,
        x: Tensor,
        values: Tensor,
        scales: Tensor,
        bias: Tensor | RowBias | None,
        out: Tensor,
        gate: str | None = None,
    ) -> None:
        bias, change = split_bias(bias)
        product = change(self._multiply_fp8(x, values, scales, bias))
        if gate is None:
            out.copy_(product)
        else:
            activation(product.to(out.dtype), out, gate, True)

    def linear_w4a16(
        self,
        x: Tensor,
        values: Tensor,
        scales: Tensor,
        zeros: Tensor,
        group_size: int,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        """See `w4a16.W4A16Linear`: the weight is dequantized for each product."""
        pairs, num_rows, _ = values.shape
        codes = torch.stack([values & 15, values >> 4], 2).permute(1, 0, 2, 3).reshape(num_rows, pairs * 64)
        groups = torch.arange(x.shape[1], device=x.device) // group_size
        of_columns = (part.index_select(0, groups).T.float() for part in (scales, zeros))
        scale, zero = of_columns
        dense = (codes[:, : x.shape[1]].float() - zero) * scale
        out.copy_(self.multiply(x, dense.to(x.dtype), bias, out.dtype))

    def linear_heads(self, x: Tensor, panels: Tensor, out: Tensor) -> None:  # type: ignore[override]
        TorchKernels.linear_heads(x, self.pack_heads(panels), out)

    def multiply_packed(
        self,
        x: Tensor,
        panels: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        out_features: int,
        dtype: torch.dtype,
    ) -> Tensor:
        if scales is None:
            return self.multiply(x, panels, bias, dtype)
        if panels.dtype == torch.float8_e4m3fn:
            return self._multiply_fp8(x, panels, scales, bias).to(dtype)
        rows = quantize_rows_reference(x)
        held = panels if panels.dtype == torch.int8 else _bytes_of_int4(panels, scales, rows.values.shape[1])
        return multiply_bytes(rows.values, rows.scales, held, scales, bias).to(dtype)

    def _multiply_fp8(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """[M, N] float32; rows of x are quantized too."""
        values, row_scales = quantize_rows_fp8_reference(x, weight.dtype)
        product = self.multiply(values.float(), weight, None, torch.float32) * (row_scales[:, None] * scales)
        return product if bias is None else product + bias.float()


def _bytes_of_int4(panels: Tensor, column_scales: Tensor, width: int) -> Tensor:
    """[N, width] int8: the values of a weight times the scales of their groups."""
    values, group_scales, _ = RowKernels.unpack_int4(panels, column_scales, len(column_scales))
    num_groups = group_scales.shape[1]
    dense = values.view(len(values), num_groups, -1) * group_scales[..., None]
    return F.pad(dense.flatten(1), (0, max(0, width - dense[0].numel())))[:, :width]
