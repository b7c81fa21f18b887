"""Packed weights: their products, and the memory of the plain ones."""

from __future__ import annotations

import pytest
import torch

from shardline.kernels.torch import packed
from shardline.kernels.torch.linear import COLUMNS
from shardline.kernels.torch.torch_kernels import TorchKernels


@pytest.mark.parametrize("out_dtype", [torch.float32, None])
@pytest.mark.parametrize("exact", [True, False])
def test_products_of_parts(
    dtype: torch.dtype, out_dtype: torch.dtype | None, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_PART_BYTES", 2 * COLUMNS * 70 * 4)
    kernels = TorchKernels(torch.device("cpu"))
    kernels.is_exact = exact
    weight, bias = torch.randn(4 * COLUMNS + 5, 70).to(dtype), torch.randn(4 * COLUMNS + 5).to(dtype)
    tiles = kernels.weight_empty(dtype, *weight.shape)
    kernels.pack_weight(weight, tiles)
    for num_rows in (0, 1, 8, 65):
        x = torch.randn(num_rows, 70).to(dtype)
        out = torch.empty(num_rows, len(weight), dtype=out_dtype or dtype)
        kernels.linear(x, tiles, bias, out)
        expected = (x.double() @ weight.double().T + bias.double()).to(out.dtype)
        torch.testing.assert_close(out, expected, rtol=1e-2 if out.itemsize == 2 else 1e-4, atol=1e-4)
    assert kernels.packed is not None
    parts = kernels.packed.parts(tiles, torch.float32, exact)
    assert parts is not None
    assert len(parts) == (5 if exact else 3), "no shape has passed the check"


def test_the_plain_weight_is_given_back(dtype: torch.dtype) -> None:
    kernels = TorchKernels(torch.device("cpu"))
    weight = torch.randn(300, 70).to(dtype)
    tiles = kernels.weight_empty(dtype, 300, 70)
    kernels.pack_weight(weight, tiles)
    x = torch.randn(2, 70).to(dtype)
    first = kernels.multiply(x, tiles, None, torch.float32)
    assert not tiles.untyped_storage().nbytes()

    # Later it may be read, or multiplied in another dtype.
    assert torch.equal(kernels.multiply(x, tiles, None, torch.float32), first)
    assert not tiles.untyped_storage().nbytes()
    kernels.multiply(x, tiles, None, dtype)
    rows = torch.empty(2, 70, dtype=dtype)
    kernels.unpack_rows(tiles, torch.tensor([299, 1]), rows)
    assert torch.equal(rows, weight[[299, 1]])
    assert torch.equal(kernels.multiply(x, tiles, None, torch.float32), first)


def test_rows_that_are_read_stay(dtype: torch.dtype) -> None:
    kernels = TorchKernels(torch.device("cpu"))
    weight = torch.randn(300, 70).to(dtype)
    tiles = kernels.weight_empty(dtype, 300, 70)
    kernels.pack_weight(weight, tiles)
    rows = torch.empty(2, 70, dtype=dtype)
    kernels.unpack_rows(tiles, torch.tensor([0, 255]), rows)
    kernels.multiply(rows, tiles, None, torch.float32)
    assert tiles.untyped_storage().nbytes()
    assert torch.equal(rows, weight[[0, 255]])


def test_a_weight_of_which_something_would_be_lost_is_kept() -> None:
    """A float32 weight times rows in bfloat16."""
    kernels = TorchKernels(torch.device("cpu"))
    weight, x = torch.randn(300, 70), torch.randn(2, 70)
    tiles = kernels.weight_empty(torch.float32, 300, 70)
    kernels.pack_weight(weight, tiles)
    kernels.multiply(x.bfloat16(), tiles, None, torch.bfloat16)
    exact = kernels.multiply(x, tiles, None, torch.float32)[:, :300]
    torch.testing.assert_close(exact, x @ weight.T, rtol=1e-5, atol=1e-5)
    kernels.multiply(x, tiles, None, torch.float32)
    rows = torch.empty(1, 70)
    kernels.unpack_rows(tiles, torch.tensor([7]), rows)
    assert torch.equal(rows[0], weight[7])
