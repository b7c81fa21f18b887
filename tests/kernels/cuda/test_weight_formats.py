"""What every weight format promises (`weights.base`), with the GPU's kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardline.runtime.ops.activation import activation, gated_activation
from shardline.runtime.ops.moe.experts import expert_up
from shardline.runtime.ops.sampling.sample import find_best
from shardline.weights.base import FormatChoice, WeightFormat, weight_format
from shardline.weights.formats import format_names
from shardline.weights.grouped import GroupedWeight
from shardline.weights.rows import quantize_rows
from tests.kernels.cuda.helpers import KERNELS
from tests.runtime.ops.helpers import assert_close, assert_same_bits, randn
from tests.runtime.ops.moe.test_experts import choose

GROUP_SIZE = 32
ROWS, COLUMNS, DEPTH = 5, 40, 128

NAMES = [name for name in format_names() if weight_format(name).is_for_gpus]
FORMATS = pytest.mark.parametrize("name", NAMES)
WEIGHTS = [(name, False) for name in NAMES]
WEIGHTS += [(name, True) for name in NAMES if weight_format(name).reads_packed]
"""Name of a format, and whether the checkpoint has packed the weight."""
EVERY_WEIGHT = pytest.mark.parametrize(
    ("name", "is_packed"), WEIGHTS, ids=[f"{name}{'-packed' * packed}" for name, packed in WEIGHTS]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])

Weight = Tensor | GroupedWeight


def format_of(name: str) -> WeightFormat:
    return FormatChoice(name, GROUP_SIZE).open_format()


def random_weight(
    rng: torch.Generator, is_packed: bool, columns: int, depth: int, dtype: torch.dtype = torch.float32
) -> Any:
    """A tensor, or what only formats that read packed weights take."""
    if not is_packed:
        return randn(columns, depth, dtype=dtype, rng=rng)
    groups = -(-depth // GROUP_SIZE)
    return GroupedWeight(
        torch.randint(0, 16, (columns, depth), generator=rng, dtype=torch.uint8),
        (torch.rand(columns, groups, generator=rng) / 8).half(),
        torch.arange(depth) // GROUP_SIZE,
        torch.randint(0, 17, (columns, groups), generator=rng, dtype=torch.uint8),
    )


def rows_of(weight: Weight, rows: slice) -> Any:
    if isinstance(weight, Tensor):
        return weight[rows]
    return weight.select_rows(rows)


def held_tensors(packed: object) -> Iterator[Tensor]:
    """All tensors in what a format made."""
    for field in dataclasses.fields(packed):  # type: ignore[arg-type]
        value = getattr(packed, field.name)
        if isinstance(value, Tensor):
            yield value
        elif dataclasses.is_dataclass(value):
            yield from held_tensors(value)


def assert_same_bytes(ours: object, theirs: object) -> None:
    """Not of what pads the last group, which nobody has written."""
    pairs = list(zip(held_tensors(ours), held_tensors(theirs), strict=True))
    assert pairs
    for mine, other in pairs:
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


@EVERY_WEIGHT
@DTYPES
@pytest.mark.parametrize("depth", [70, DEPTH])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_match_the_formats_reference(rng, name, is_packed, dtype, depth, with_bias):
    format, weight = format_of(name), random_weight(rng, is_packed, COLUMNS, depth, dtype)
    x = randn(ROWS, depth, dtype=dtype, rng=rng)
    bias = randn(COLUMNS, dtype=dtype, rng=rng) if with_bias else None
    packed = format.pack_linear(KERNELS, weight)
    assert packed.out_features == COLUMNS
    for out_dtype in (dtype, torch.float32):
        expected = format.multiply_reference(KERNELS, x, weight, bias, out_dtype)
        actual = packed(x, bias, out_dtype=out_dtype)
        if packed.input_form == "quantized":  # sums of bytes are exact
            assert_same_bits(actual, expected)
            assert_same_bits(packed(quantize_rows(KERNELS, x), bias, out_dtype=out_dtype), expected)
        else:
            assert_close(actual, expected, scale=depth**0.5)
    assert_same_bits(packed(x, bias), packed(x, bias, out_dtype=dtype))


@EVERY_WEIGHT
@DTYPES
def test_parts_are_packed_as_the_whole(rng, name, is_packed, dtype):
    format, weight = format_of(name), random_weight(rng, is_packed, COLUMNS, DEPTH, dtype)
    whole = format.pack_linear(KERNELS, weight)
    parts = [rows_of(weight, rows) for rows in (slice(0, 7), slice(7, 8), slice(8, COLUMNS))]
    in_parts = format.pack_linear(KERNELS, *parts)
    assert in_parts.nbytes == whole.nbytes
    assert_same_bytes(in_parts, whole)
    x = randn(ROWS, DEPTH, dtype=dtype, rng=rng)
    # A rank that has some of the rows has the same bits for them.
    assert_same_bits(torch.cat([format.pack_linear(KERNELS, part)(x) for part in parts], dim=1), whole(x))


@FORMATS
def test_parts_may_be_strided(rng, name):
    format, wide = format_of(name), randn(COLUMNS, DEPTH + 30, rng=rng)
    strided = wide[:, 10 : 10 + DEPTH]
    assert_same_bytes(format.pack_linear(KERNELS, strided), format.pack_linear(KERNELS, strided.contiguous()))


@EVERY_WEIGHT
def test_rows_do_not_depend_on_their_neighbours(rng, name, is_packed):
    packed = format_of(name).pack_linear(KERNELS, random_weight(rng, is_packed, COLUMNS, DEPTH))
    x = randn(66, DEPTH, rng=rng)
    whole = packed(x)
    for rows in (slice(0, 1), slice(63, 65), slice(65, 66)):
        assert_same_bits(packed(x[rows]), whole[rows])


@EVERY_WEIGHT
def test_rows_of_another_width_are_refused(rng, name, is_packed):
    format, weight, x = format_of(name), random_weight(rng, is_packed, COLUMNS, DEPTH), randn(ROWS, 64, rng=rng)
    with pytest.raises(ValueError, match=f"x has 64 features, the weight takes {DEPTH}"):
        format.pack_linear(KERNELS, weight)(x)
    with pytest.raises(ValueError, match=f"x has 64 features, the weight takes {DEPTH}"):
        format.pack_gated(KERNELS, weight, weight)(x, None, "silu")


@EVERY_WEIGHT
@DTYPES
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_gated_linear_is_both_products_and_then_the_gate(rng, name, is_packed, dtype, with_bias):
    format, x = format_of(name), randn(ROWS, DEPTH, dtype=dtype, rng=rng)
    gate, up = (random_weight(rng, is_packed, COLUMNS, DEPTH, dtype) for _ in range(2))
    bias = randn(2 * COLUMNS, dtype=dtype, rng=rng) if with_bias else None
    both, gated = format.pack_linear(KERNELS, gate, up), format.pack_gated(KERNELS, gate, up)
    assert gated.nbytes == both.nbytes
    assert gated.input_form == both.input_form
    for activation_name in ("silu", "gelu_tanh"):
        expected = gated_activation(KERNELS, both(x, bias), activation_name)
        assert_same_bits(gated(x, bias, activation_name), expected)
        if gated.input_form == "quantized":
            assert_same_bits(gated(quantize_rows(KERNELS, x), bias, activation_name), expected)


@FORMATS
@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_experts_have_the_bits_of_one_linear(rng, name, gated):
    format, weights = format_of(name), randn(3, COLUMNS, DEPTH, rng=rng)
    x, ids = randn(ROWS, DEPTH, rng=rng), choose(ROWS, 3, 2, rng)
    half = COLUMNS // 2
    experts, whole = (format.allocate_experts(KERNELS, 3, weights[0, :half], weights[0, half:]) for _ in range(2))
    for index, weight in enumerate(weights):
        format.pack_expert(KERNELS, experts, index, weight[:half], weight[half:])
        format.pack_expert(KERNELS, whole, index, weight)
    assert_same_bytes(experts, whole)
    assert (experts.out_features, experts.in_features) == (COLUMNS, DEPTH)
    rows = expert_up(KERNELS, x, ids, experts, "silu", gated=gated)
    finish = gated_activation if gated else activation
    for expert, weight in enumerate(weights):
        alone = finish(KERNELS, format.pack_linear(KERNELS, weight)(x), "silu")
        chosen = ids == expert
        assert_same_bits(rows[chosen.flatten()], alone[chosen.nonzero()[:, 0]])


@FORMATS
@DTYPES
@pytest.mark.parametrize("with_bias", [False, True])
def test_argmax_of_an_lm_head_is_that_of_its_logits(rng, name, dtype, with_bias):
    lm_head = format_of(name).pack_lm_head(KERNELS, randn(70, DEPTH, dtype=dtype, rng=rng).repeat(2, 1))  # ties
    x = randn(ROWS, DEPTH, dtype=dtype, rng=rng)
    x[3, 5] = torch.nan
    bias = randn(70, dtype=dtype, rng=rng).repeat(2) if with_bias else None
    best = lm_head.argmax(x, bias)
    assert_same_bits(best, find_best(KERNELS, lm_head(x, bias, out_dtype=torch.float32)))
    if lm_head.input_form == "quantized":
        assert_same_bits(lm_head.argmax(quantize_rows(KERNELS, x), bias), best)
    assert best[[0, 1, 2, 4], 1].contiguous().view(torch.int32).max() < 70


@EVERY_WEIGHT
@DTYPES
def test_bytes_of_layers_are_those_that_the_plan_counts(rng, name, is_packed, dtype):
    """At a shape without padding; what a checkpoint has not packed is plain."""
    format, weight = format_of(name), random_weight(rng, is_packed, COLUMNS, DEPTH, dtype)
    counted = weight_format("plain") if format.reads_packed and not is_packed else format
    expected = counted.num_bytes(COLUMNS, DEPTH, dtype.itemsize)
    assert format.pack_linear(KERNELS, weight).nbytes == expected
    assert format.pack_gated(KERNELS, weight, weight).nbytes == 2 * expected


@FORMATS
@DTYPES
def test_bytes_of_experts_and_lm_heads_are_those_that_the_plan_counts(rng, name, dtype):
    format, weight = format_of(name), randn(COLUMNS, DEPTH, dtype=dtype, rng=rng)
    size = dtype.itemsize
    assert format.pack_lm_head(KERNELS, weight).nbytes == format.num_bytes(COLUMNS, DEPTH, size, "lm_head")
    experts = format.allocate_experts(KERNELS, 3, weight)
    assert experts.nbytes == 3 * format.num_bytes(COLUMNS, DEPTH, size, "expert")


@EVERY_WEIGHT
def test_no_rows_give_no_outputs(rng, name, is_packed):
    format, weight = format_of(name), random_weight(rng, is_packed, COLUMNS, DEPTH)
    nothing = torch.empty(0, DEPTH)
    assert format.pack_linear(KERNELS, weight)(nothing).shape == (0, COLUMNS)
    assert format.pack_gated(KERNELS, weight, weight)(nothing, None, "silu").shape == (0, COLUMNS)
