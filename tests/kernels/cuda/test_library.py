"""The library's products stand for ours only where they were seen to have our bits, and change none there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shardline.kernels.cuda import library
from shardline.kernels.cuda.activations import empty_rows
from shardline.kernels.cuda.library import equal_sizes, padded_rows, tried_rows, use_library
from shardline.kernels.cuda.library_trial import ours, try_library
from shardline.runtime.ops.activation import gated_activation_reference
from tests.kernels.cuda.helpers import CPU, KERNELS, linear_reference
from tests.runtime.ops.helpers import assert_close, assert_same_bits, randn


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    use_library({})


class Library:
    """A product that says with how many rows it was called, and sums K in parts with some of them."""

    def __init__(self, split_from: int = 10**9, wrong_rows: slice | None = None) -> None:
        self.calls: list[int] = []
        self._split_from = split_from
        self._wrong_rows = wrong_rows

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        self.calls.append(len(x))
        exact(x, weight, out)
        if len(x) >= self._split_from:
            half = x.shape[1] // 2
            other = torch.empty_like(out)
            exact(x[:, :half].contiguous(), weight[:, :half], out)
            exact(x[:, half:].contiguous(), weight[:, half:], other)
            out += other
        if self._wrong_rows is not None:
            out[self._wrong_rows] = torch.nextafter(out[self._wrong_rows], torch.tensor(torch.inf))


def exact(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """A row's bits are its own: sums in fp64, rounded once."""
    out.copy_((x.double()[:, None] * weight.double()).sum(2))


def test_numbers_of_rows_that_are_tried_are_those_that_are_used():
    sizes = tried_rows(20000)
    assert sizes[:3] == [128, 256, 384]
    assert sizes == sorted({padded_rows(rows) for rows in range(65, 20001)})
    assert all((padded_rows(rows) - rows) / rows < 1 / 16 for rows in range(2048, 20001))
    assert [padded_rows(rows) for rows in (1, 64)] == [1, 64]
    assert tried_rows(64) == []
    assert max(larger - smaller for smaller, larger in pairwise(sizes)) == 1024


def test_an_invariant_library_is_found(rng):
    x, weight = randn(384, 24, rng=rng), randn(7, 24, rng=rng)
    assert equal_sizes(exact, Library(), x, weight, [384, 256, 128], 60.0) == {128, 256, 384}


def test_numbers_of_rows_with_which_sums_are_split_are_left_out(rng):
    x, weight = randn(384, 24, rng=rng), randn(7, 24, rng=rng)
    assert equal_sizes(exact, Library(split_from=256), x, weight, [384, 256, 128], 60.0) == {128}


@pytest.mark.parametrize("rows", [slice(0, 1), slice(127, 128), slice(383, 384)])
def test_one_row_in_one_place_that_differs_in_its_last_bit_is_enough(rng, rows):
    x, weight = randn(384, 24, rng=rng), randn(7, 24, rng=rng)
    found = equal_sizes(exact, Library(wrong_rows=rows), x, weight, [384, 256, 128], 60.0)
    assert found == {size for size in (128, 256, 384) if size <= rows.start}


def test_what_there_is_no_time_or_memory_for_is_not_used(rng):
    x, weight = randn(128, 24, rng=rng), randn(7, 24, rng=rng)
    assert equal_sizes(exact, Library(), x, weight, [128], 0.0) == frozenset()
    found = try_library([(7, 24)], 300, torch.float32, CPU, 4 * 4 * (2 * 7 + 24) * 300, exact=exact, library=Library())
    assert found == {(7, 24): {128, 256}}


def test_the_interpreters_product_is_tried_against_itself():
    found = try_library([(33, 70)], 100, torch.float32, CPU, 1 << 30, library=ours)
    assert found == {(33, 70): {128}}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library in use with one shape and 128 rows."""
    fake = Library()
    monkeypatch.setattr(library, "matmul", fake)
    use_library({(40, 64): frozenset({128})})
    return fake


@pytest.mark.parametrize("rows", [65, 100, 128])
def test_products_are_filled_up_to_what_was_tried(rng, used, rows):
    x, out = empty_rows(CPU, torch.float32, rows, 64), empty_rows(CPU, torch.float32, rows, 40)
    weight = randn(40, 64, rng=rng)
    x.copy_(randn(rows, 64, rng=rng))
    KERNELS.linear(x, weight, None, out)
    assert used.calls == [128]
    assert_close(out, linear_reference(x, weight), scale=8)


def test_gated_products_come_from_the_library_too(rng, used):
    x, out = empty_rows(CPU, torch.float32, 100, 64), empty_rows(CPU, torch.float32, 100, 20)
    x.copy_(randn(100, 64, rng=rng))
    weight = randn(40, 64, rng=rng)
    KERNELS.linear(x, weight, None, out, "silu")
    assert used.calls == [128]
    assert_close(out, gated_activation_reference(linear_reference(x, weight), "silu"), scale=64)


def test_ours_computes_what_was_not_tried(rng, used):
    weight, bias = randn(40, 64, rng=rng), randn(40, rng=rng)

    def call(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        KERNELS.linear(x, weight, bias, out)
        assert used.calls == []
        assert_close(out, linear_reference(x, weight, bias, out_dtype=out.dtype), scale=8)

    x, out = empty_rows(CPU, torch.float32, 100, 64), empty_rows(CPU, torch.float32, 100, 40)
    x.copy_(randn(100, 64, rng=rng))
    call(x[:64], weight, None, out[:64])  # few rows
    call(x, weight, bias, out)  # a bias
    call(x.clone(), weight, None, out)  # no memory behind the rows
    call(x, weight, None, out.clone())
    call(x, randn(41, 64, rng=rng), None, empty_rows(CPU, torch.float32, 100, 41))  # another shape
    larger = torch.full((140, 40), 7.0)
    call(x, weight, None, larger[:100])  # somebody else's rows behind
    assert bool((larger[100:] == 7.0).all())
    many = randn(200, 64, rng=rng)
    call(many, weight, None, torch.empty(200, 40))  # 256 rows


def test_fast_numerics_take_the_library_always(rng):
    use_library({}, always=True)
    x, weight, bias = randn(3, 64, rng=rng), randn(40, 64, rng=rng), randn(40, rng=rng)
    for given in (None, bias):
        out = torch.full((3, 40), torch.nan)
        KERNELS.linear(x, weight, given, out)
        expected = torch.mm(x, weight.T) if given is None else torch.addmm(given, x, weight.T)
        assert_same_bits(out, expected)
