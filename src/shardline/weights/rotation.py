"""Rows with their parts mixed, so that a few large numbers become many small ones, and fewer bits describe them well.

A row of K numbers is 32 parts of K / 32 neighbours each, or as many as a power of two divides K, and a Hadamard matrix
mixes the parts. It is mixed into x before it is quantized, and into the weight before it is packed, so their product
stays what it is. (QuaRot, arXiv 2404.00456, mixes whole rows.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from shardline.kernels.tensors import QuantizedRows

if TYPE_CHECKING:
    from torch import Tensor

    from shardline.kernels.contract import Kernels

_MOST_PARTS = 32


class RotationKernels(Protocol):
    """What a back end offers for this."""

    def quantize_rotated(self, x: Tensor, values: Tensor, scales: Tensor, sums: Tensor, /) -> None:
        """As `Kernels.quantize_rows`, of rows that are mixed first, in fp32."""


def quantize_rotated(kernels: Kernels, x: Tensor) -> QuantizedRows:
    """x [M, K], float32 or bfloat16, mixed and then quantized; rows may be strided.

    A row's bytes depend only on that row.
    """
    rows = kernels.quantized_empty(x.shape[0], x.shape[1], x.dtype)
    cast("RotationKernels", kernels).quantize_rotated(x, rows.values, rows.scales, rows.sums)
    return rows


def num_parts(columns: int) -> int:
    """Parts of a row: a power of two."""
    return min(_MOST_PARTS, columns & -columns)


def rotate_reference(rows: Tensor) -> Tensor:
    """The oracle in plain torch: rows [M, K] with their parts mixed, float32, with the kernels' bits.

    Mixed twice, a row is itself times its number of parts.
    """
    (num_rows, columns), bit = rows.shape, 1
    parts, mixed = num_parts(columns), rows.float()
    while bit < parts:
        pairs = mixed.reshape(num_rows, parts // (2 * bit), 2, bit * (columns // parts))
        mixed = pairs.new_empty(pairs.shape)
        mixed[:, :, 0], mixed[:, :, 1] = pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]
        bit *= 2
    return mixed.reshape(num_rows, columns)
