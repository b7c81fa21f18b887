"""What every weight format promises (see `weights.base`), for each that there is a file of."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.ops.activation import gated_activation
from shardline.runtime.ops.moe.experts import expert_up
from shardline.runtime.ops.sampling.sample import find_best
from shardline.weights.base import PackedExperts, WeightFormat, weight_format
from shardline.weights.formats import format_names
from shardline.weights.rows import quantize_rows
from tests.runtime.ops.helpers import KERNELS, assert_close, assert_same_bits, randn

EXACT_ORACLES = {"int8", "int8_fast", "int4_fast"}
"""Formats whose oracle has the product's very bits; the others' sums are in fp64."""

PARTS = [(150,), (1, 149), (64, 64, 22), (65, 0, 85), (7, 3, 1, 139)]
SLICES = [(0, 1), (0, 67), (67, 134), (134, 150), (149, 150), (63, 129)]
BATCHES = (*range(1, 34), 61, 119, 121, 239, 241, 481)
"""Numbers of rows: every way to cut a few rows into tiles, and those about the bounds of a task (see gemm_tiles.h)."""


PACKED = ("packed", "fp8_w8a8")
"""Formats of tests/weights/test_packed.py: what they make has the CPU's own form."""


@pytest.fixture(params=[name for name in format_names() if name not in PACKED])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def form(name: str) -> WeightFormat:
    return weight_format(name)


def held_tensors(packed: object) -> list[Tensor]:
    """All tensors in a packed weight, in the order of its fields."""
    if isinstance(packed, Tensor):
        return [packed]
    parts = packed if isinstance(packed, tuple) else ()
    if dataclasses.is_dataclass(packed):
        parts = tuple(getattr(packed, field.name) for field in dataclasses.fields(packed))
    return [tensor for part in parts for tensor in held_tensors(part)]


def panel_bits(flags: Tensor) -> Tensor:
    """Flags [M, N] as bits [M, ceil(N / 64)] int64."""
    panels = torch.nn.functional.pad(flags, (0, -flags.shape[1] % 64)).view(len(flags), -1, 64)
    return (panels.long() << torch.arange(64)).sum(-1)


def assert_same_bytes(packed: object, expected: object) -> None:
    pairs = list(zip(held_tensors(packed), held_tensors(expected), strict=True))
    assert pairs
    for mine, theirs in pairs:
        assert torch.equal(mine, theirs)


def strided(weight: Tensor, parts: tuple[int, ...]) -> list[Tensor]:
    """Parts of a weight, with strided rows, as they lie in a file."""
    return [torch.nn.functional.pad(part, (1, 2))[:, 1:-2] for part in torch.split(weight, list(parts))]


def packed_experts(form: WeightFormat, weights: Tensor, parts: tuple[int, ...]) -> PackedExperts:
    """weights: [E, out, in]"""
    experts = form.allocate_experts(KERNELS, len(weights), *strided(weights[0], parts))
    for index, weight in enumerate(weights):
        form.pack_expert(KERNELS, experts, index, *strided(weight, parts))
    return experts


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.usefixtures("isa")
def test_parts_are_packed_like_the_whole(form, dtype, rng, parts):
    weight = randn(150, 77, dtype=dtype, rng=rng)
    packed, whole = form.pack_linear(KERNELS, *strided(weight, parts)), form.pack_linear(KERNELS, weight)
    assert packed.out_features == whole.out_features == 150
    assert_same_bytes(packed, whole)
    stack = torch.stack([weight, weight.flip(0), 2 * weight])
    experts, whole_experts = packed_experts(form, stack, parts), packed_experts(form, stack, (150,))
    assert (experts.out_features, experts.in_features) == (150, 77)
    assert_same_bytes(experts, whole_experts)


@pytest.mark.usefixtures("isa")
def test_an_output_depends_on_its_row_of_x_only(form, dtype, rng):
    weight, bias = randn(70, 150, dtype=dtype, rng=rng), randn(70, dtype=dtype, rng=rng)
    x = randn(490, 150, dtype=dtype, rng=rng)
    for packed in (form.pack_linear(KERNELS, weight), form.pack_lm_head(KERNELS, weight)):
        whole = packed(x, bias, out_dtype=torch.float32)
        for m in BATCHES:
            assert_same_bits(packed(x[:m], bias, out_dtype=torch.float32), whole[:m])
        for start in (1, 5, 239, 489):
            assert_same_bits(packed(x[start : start + 1], bias, out_dtype=torch.float32), whole[start : start + 1])


@pytest.mark.usefixtures("isa")
def test_an_output_depends_on_its_row_of_the_weight_only(form, dtype, rng):
    weight, x = randn(150, 1100, dtype=dtype, rng=rng), randn(9, 1100, dtype=dtype, rng=rng)
    bias = randn(150, dtype=dtype, rng=rng)
    for pack in (form.pack_linear, form.pack_lm_head):
        whole = pack(KERNELS, weight)(x, bias, out_dtype=torch.float32)
        for begin, end in SLICES:
            part = pack(KERNELS, weight[begin:end])(x, bias[begin:end], out_dtype=torch.float32)
            assert_same_bits(part, whole[:, begin:end])


@pytest.mark.usefixtures("isa")
def test_threads_do_not_matter(form, dtype, rng):
    """With three threads, the rows are cut into smaller tasks."""
    weight, x = randn(140, 300, dtype=dtype, rng=rng), randn(300, 300, dtype=dtype, rng=rng)
    packed, gated = form.pack_linear(KERNELS, weight), form.pack_gated(KERNELS, weight[:70], weight[70:])
    alone, gated_alone = packed(x, out_dtype=torch.float32), gated(x, None, "silu")
    for num_threads in (2, 3):
        _cpu.set_num_threads(num_threads)
        assert_same_bits(packed(x, out_dtype=torch.float32), alone)
        assert_same_bits(gated(x, None, "silu"), gated_alone)
        assert_same_bytes(form.pack_linear(KERNELS, weight), packed)
    _cpu.set_num_threads(1)


# The deepest has several blocks of K in every format.
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 64), (3, 77, 100), (6, 1, 1), (13, 4200, 65), (250, 130, 190)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("isa")
def test_products_are_those_of_the_oracle(name, form, dtype, rng, m, k, n, with_bias):
    x, weight = randn(m, k, dtype=dtype, rng=rng), randn(n, k, dtype=dtype, rng=rng)
    bias = randn(n, dtype=dtype, rng=rng) if with_bias else None
    packed = form.pack_linear(KERNELS, weight)
    for out_dtype in (torch.bfloat16, torch.float32):
        actual = packed(x, bias, out_dtype=out_dtype)
        expected = form.multiply_reference(KERNELS, x, weight, bias, out_dtype)
        if name in EXACT_ORACLES:
            assert_same_bits(actual, expected)
        else:
            assert_close(actual, expected, scale=x.double().abs() @ weight.double().abs().T + 1)
    assert_same_bits(packed(x, bias), packed(x, bias, out_dtype=dtype))


def test_products_are_near_those_of_the_dense_weight(form, dtype, rng):
    x, weight = randn(9, 100, dtype=dtype, rng=rng), randn(150, 100, dtype=dtype, rng=rng)
    bias = randn(150, dtype=dtype, rng=rng)
    exact = x.double() @ weight.double().T + bias.double()
    for pack in (form.pack_linear, form.pack_lm_head):
        packed = pack(KERNELS, weight)
        out = packed(x, bias)
        assert out.dtype == dtype
        assert packed(x, out_dtype=torch.float32).dtype == torch.float32
        assert (out.double() - exact).norm() / exact.norm() < 0.12
        assert torch.equal(pack(KERNELS, weight[37:])(x[3:], bias[37:]), out[3:, 37:])


@pytest.mark.usefixtures("isa")
def test_rows_may_come_quantized_where_the_format_says_so(form, dtype, rng):
    x, weight = randn(9, 100, dtype=dtype, rng=rng), randn(150, 100, dtype=dtype, rng=rng)
    bias, rows = randn(150, dtype=dtype, rng=rng), quantize_rows(KERNELS, x)
    for packed in (form.pack_linear(KERNELS, weight), form.pack_lm_head(KERNELS, weight)):
        assert packed.input_form in ("tensor", "quantized")
        if packed.input_form == "quantized":
            assert_same_bits(packed(rows, bias), packed(x, bias))
            assert_same_bits(packed(rows, bias, out_dtype=torch.float32), packed(x, bias, out_dtype=torch.float32))
    gated = form.pack_gated(KERNELS, weight[:75], weight[75:])
    if gated.input_form == "quantized":
        assert_same_bits(gated(rows, bias, "silu"), gated(x, bias, "silu"))
    head = form.pack_lm_head(KERNELS, weight)
    if head.input_form == "quantized":
        assert_same_bits(head.argmax(rows, bias), head.argmax(x, bias))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("isa")
def test_gated_products_are_rounded_once(form, dtype, rng, with_bias):
    x, gate, up = (randn(rows, 150, dtype=dtype, rng=rng) for rows in (490, 101, 101))
    bias = randn(2 * 101, dtype=dtype, rng=rng) if with_bias else None
    product = form.pack_linear(KERNELS, gate, up)(x, bias, out_dtype=torch.float32)
    expected = gated_activation(KERNELS, product, "silu").to(dtype)
    packed = form.pack_gated(KERNELS, gate, up)
    for m in BATCHES:
        assert_same_bits(packed(x[:m], bias, "silu"), expected[:m])


@pytest.mark.usefixtures("isa")
def test_rows_may_have_biases_of_their_own(form, dtype, rng):
    """As adapters need them. Where they are -0, nothing is added."""
    x, gate, up = (randn(rows, 150, dtype=dtype, rng=rng) for rows in (27, 101, 101))
    biases = randn(27, 2 * 101, rng=rng)
    biases[5] = -0.0
    linear, gated = form.pack_linear(KERNELS, gate, up), form.pack_gated(KERNELS, gate, up)
    together = linear(x, biases), linear(x, biases, out_dtype=torch.float32), gated(x, biases, "silu")
    for row in range(27):
        one, bias = x[row : row + 1], None if row == 5 else biases[row].clone()
        alone = linear(one, bias), linear(one, bias, out_dtype=torch.float32), gated(one, bias, "silu")
        for mine, theirs in zip(together, alone, strict=True):
            assert_same_bits(mine[row : row + 1], theirs)
    with pytest.raises(ValueError, match="bias has shape"):
        linear(x, biases[:5])


@pytest.mark.usefixtures("isa")
def test_rows_may_have_factors_of_their_sums(form, dtype, rng):
    """As adapters with DoRA need them. Where they are 1, the bits are those without."""
    x, gate, up = (randn(rows, 150, dtype=dtype, rng=rng) for rows in (7, 101, 101))
    both = randn(7, 2, 2 * 101, rng=rng)
    both[2, 1] = 1.0
    linear, gated = form.pack_linear(KERNELS, gate, up), form.pack_gated(KERNELS, gate, up)
    sums = linear(x, out_dtype=torch.float32)
    scaled = linear(x, both, out_dtype=torch.float32)
    torch.testing.assert_close(scaled, (sums.double() * both[:, 1] + both[:, 0]).float(), rtol=1e-6, atol=1e-6)
    assert_same_bits(linear(x, both), scaled.to(dtype))
    assert_same_bits(gated(x, both, "silu"), gated_activation(KERNELS, scaled, "silu").to(dtype))
    row, bias = x[2:3], both[2, :1]
    for mine, theirs in ((linear(x, both), linear(row, bias)), (gated(x, both, "silu"), gated(row, bias, "silu"))):
        assert_same_bits(mine[2:3], theirs)
    for wrong in (both[:5], both[..., :-1]):
        with pytest.raises(ValueError, match="bias has shape"):
            linear(x, wrong)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("isa")
def test_a_gated_output_depends_on_its_rows_of_the_weight_only(form, dtype, rng, with_bias):
    x, gate, up = (randn(rows, 1100, dtype=dtype, rng=rng) for rows in (9, 101, 101))
    bias = randn(2 * 101, dtype=dtype, rng=rng) if with_bias else None
    whole = form.pack_gated(KERNELS, gate, up)(x, bias, "silu")
    for begin, end in [(0, 1), (0, 34), (34, 68), (68, 101), (100, 101), (31, 65)]:
        both = None if bias is None else torch.cat([bias[begin:end], bias[101 + begin : 101 + end]])
        part = form.pack_gated(KERNELS, gate[begin:end], up[begin:end])
        assert_same_bits(part(x, both, "silu"), whole[:, begin:end].contiguous())


@pytest.mark.usefixtures("isa")
def test_rows_of_experts_have_the_bits_of_one_linear(form, dtype, rng):
    weights, x = randn(3, 140, 96, dtype=dtype, rng=rng), randn(40, 96, dtype=dtype, rng=rng)
    ids = torch.rand(40, 3, generator=rng).topk(2)[1].to(torch.int32)
    ids[:30, 0], ids[:30, 1] = 2, 1  # many rows for some, few for one
    whole = expert_up(KERNELS, x, ids, packed_experts(form, weights, (70, 70)), "silu", gated=True)
    begin = 0
    for expert, weight in enumerate(weights):
        rows = x[(ids == expert).any(1)]
        alone = gated_activation(KERNELS, form.pack_linear(KERNELS, weight)(rows), "silu")
        assert_same_bits(whole[begin : begin + len(rows)], alone)
        begin += len(rows)
    assert begin == ids.numel()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 1), (3, 77, 63), (7, 100, 64), (9, 40, 65), (250, 130, 333)])
@pytest.mark.usefixtures("isa")
def test_the_best_output_is_the_first_largest_of_all(form, dtype, rng, with_bias, m, k, n):
    x, weight = randn(m, k, dtype=dtype, rng=rng), randn(n, k, dtype=dtype, rng=rng)
    weight[n // 2 :] = weight[: n - n // 2].clone()  # ties
    bias = randn(n, dtype=dtype, rng=rng) if with_bias else None
    head = form.pack_lm_head(KERNELS, weight)
    logits = head(x, bias, out_dtype=torch.float32)
    best = head.argmax(x, bias)
    assert_same_bits(best, find_best(KERNELS, logits))
    assert_same_bits(best[:, 0].contiguous(), logits.amax(1))
    is_largest = logits == logits.amax(1, keepdim=True)
    assert torch.equal(best[:, 1].contiguous().view(torch.int32), is_largest.int().argmax(1).int())
    allowed = torch.rand(m, n, generator=rng) < 0.1
    allowed[0], allowed[:, 64:128] = False, False  # a row without any, and a panel that no row needs
    among_allowed = logits.masked_fill(~allowed, -torch.inf)
    assert_same_bits(head.argmax(x, bias, panel_bits(allowed)), find_best(KERNELS, among_allowed))


@pytest.mark.usefixtures("isa")
def test_ties_go_to_the_lowest_column(form, dtype, rng):
    x, few = randn(20, 32, dtype=dtype, rng=rng), randn(3, 32, dtype=dtype, rng=rng)
    order = torch.randint(0, 3, (333,), generator=rng)
    ids = form.pack_lm_head(KERNELS, few[order]).argmax(x)[:, 1].contiguous().view(torch.int32)
    first = [int((order == kind).int().argmax()) for kind in range(3)]
    assert set(ids.tolist()) <= set(first)
    assert len(set(ids.tolist())) > 1


def test_bytes_are_those_of_the_formula(form, dtype):
    """For sizes that need no padding."""
    weight, size = torch.ones(192, 128, dtype=dtype), dtype.itemsize
    assert form.pack_linear(KERNELS, weight).nbytes == form.num_bytes(192, 128, size)
    assert form.pack_gated(KERNELS, weight, weight).nbytes == form.num_bytes(2 * 192, 128, size)
    assert form.pack_lm_head(KERNELS, weight).nbytes == form.num_bytes(192, 128, size, "lm_head")
    experts = packed_experts(form, torch.stack([weight] * 3), (64, 128))
    assert experts.nbytes == 3 * form.num_bytes(192, 128, size, "expert")


def test_rows_of_another_width_are_refused(form):
    weight = torch.ones(5, 8)
    for packed in (form.pack_linear(KERNELS, weight), form.pack_lm_head(KERNELS, weight)):
        with pytest.raises(ValueError, match="x has 9 features, the weight takes 8"):
            packed(torch.ones(2, 9))
    with pytest.raises(ValueError, match="x has 9 features, the weight takes 8"):
        form.pack_gated(KERNELS, weight, weight)(torch.ones(2, 9), None, "silu")


def test_no_rows_give_no_outputs(form, dtype):
    weight = torch.ones(5, 8, dtype=dtype)
    assert form.pack_linear(KERNELS, weight)(torch.empty(0, 8, dtype=dtype)).shape == (0, 5)
