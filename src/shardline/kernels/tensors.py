"""Tensors with a form that kernels and their callers share. Nothing here imports torch: the planner counts with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP_SIZE = 32
"""Neighbours along K that share a scale in int4; quantized rows are padded to whole groups."""


class QuantizedRows(NamedTuple):
    """Rows x [M, K] as `scales * values`, with one scale per row."""

    values: Tensor
    """[M, K padded with zeros to whole groups] int8, within [-127, 127]."""
    scales: Tensor
    """[M] float32; NaN for a row that is not finite."""
    sums: Tensor
    """[M, 1 + number of groups] int32: the sum of the row's values, then of each group's. Empty, [M, 0], if the
    products read signed weights and need no sums."""
    in_features: int
    """K"""
    dtype: torch.dtype
    """The dtype of x."""


LinearInput: TypeAlias = "Tensor | QuantizedRows"
"""Rows of activations, as a product reads them."""


InputForm = Literal["tensor", "quantized"]
"""The form that a product reads best: unquantized rows, or `QuantizedRows`."""


def as_tensor(x: LinearInput) -> Tensor:
    """x, for a product that reads only tensors."""
    assert not isinstance(x, QuantizedRows)
    return x


class RowBias(NamedTuple):
    """What a product adds to each row, where kernels round the product with its bias before."""

    bias: Tensor | None
    """[out_features], or [num_experts, out_features]: of the product itself."""
    added: Tensor
    """[num_rows, out_features] float32"""
    factors: Tensor | None
    """[num_rows, out_features] float32: of the product with its bias; None: they are 1."""

    def change(self, product: Tensor) -> Tensor:
        """The rows of a product with its bias, changed and rounded again."""
        sums = product.float() if self.factors is None else product.float() * self.factors
        return (sums + self.added).to(product.dtype)


def features_error(features: int, expected: int) -> ValueError:
    """Rows have another number of features than a weight."""
    return ValueError(f"x has {features} features, the weight takes {expected}")


class QuantizedLatents(NamedTuple):
    """A cache of latents with one byte per element; the rotated part of the keys stays in bf16."""

    values: Tensor
    """[num_blocks, block_size, R], int8 or float8_e4m3fn."""
    rope_keys: Tensor
    """[num_blocks, block_size, P] bfloat16."""
    scales: Tensor
    """[num_blocks, block_size] float32: the scales of the values."""

    def dequantized(self) -> Tensor:
        """The dequantized cache, float32 [num_blocks, block_size, R + P]."""
        import torch

        return torch.cat([self.values.float() * self.scales[..., None], self.rope_keys.float()], dim=-1)


LatentCache: TypeAlias = "Tensor | QuantizedLatents"
"""Latents of keys and values, [num_blocks, block_size, R + P]."""
