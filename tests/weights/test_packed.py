"""Weights that stay as a checkpoint packs them: every form, against the dequantized weight, and bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardline import _cpu
from shardline.kernels.host.grouped import GroupedGatedLinear, GroupedLinear
from shardline.models.partition import Span
from shardline.runtime.loader import slices
from shardline.runtime.ops.activation import gated_activation
from shardline.runtime.ops.moe.experts import expert_up
from shardline.runtime.ops.sampling.sample import find_best
from shardline.weights.base import weight_format
from shardline.weights.formats import fp8_w8a8
from shardline.weights.formats.packed import Format
from shardline.weights.grouped import GroupedWeight
from shardline.weights.rows import quantize_rows_reference
from tests.runtime.ops.helpers import KERNELS, assert_close, assert_same_bits, randn
from tests.weights.forms import FORMS, assert_same_panels, quantize

FORM = Format()
BATCHES = (*range(1, 8), 12, 13, 14, 31, 121, 241)
"""Numbers of rows: every tile, few rows and unpacked panels, and those about the bounds of a task."""


@pytest.fixture(params=FORMS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pack(*parts: GroupedWeight) -> GroupedLinear:
    packed = FORM.pack_linear(KERNELS, *parts)
    assert isinstance(packed, GroupedLinear)
    return packed


def distance(actual: Tensor, x: Tensor, dense: Tensor) -> float:
    """The largest error relative to the sum of magnitudes; `dense` is float64."""
    exact, magnitude = x.double() @ dense.T, x.double().abs() @ dense.abs().T
    return float(((actual.double() - exact).abs() / magnitude).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.usefixtures("isa")
def test_products_have_one_set_of_bits_and_are_those_of_the_oracle(name, dtype, rng):
    """K ends within an octet and a pair, and is deep enough for several blocks."""
    for n, k, batches in ((150, 333, BATCHES), (70, 2304, (1, 5, 13))):
        weight = quantize(randn(n, k, rng=rng), name)
        x, bias = randn(max(batches), k, dtype=dtype, rng=rng), randn(n, dtype=dtype, rng=rng)
        assert FORM.keeps(KERNELS, [weight], "layer")
        packed = pack(weight)
        whole = packed(x, out_dtype=torch.float32)
        # Codes that bf16 does not hold are the sum of two.
        assert distance(whole, x, weight.dequantize(torch.float32).double()) < (5e-6 if name == "nf4" else 2e-6)
        assert_same_bits(packed(x[:2], bias), (whole[:2] + bias.float()).to(dtype))
        for m in batches:
            assert_same_bits(packed(x[-m:], out_dtype=torch.float32), whole[-m:])
        parts = [weight.select_rows(slice(0, 7)), weight.select_rows(slice(7, 7)), weight.select_rows(slice(7, n))]
        assert_same_bits(pack(*parts)(x[:5], bias), packed(x[:5], bias))
        assert_same_bits(pack(weight.select_rows(slice(33, 69)))(x[:3]), packed(x[:3])[:, 33:69].contiguous())


@pytest.mark.parametrize("form", ["q6_k", "q5_k"])
@pytest.mark.usefixtures("isa")
def test_six_bits_have_the_bits_of_eight(form, rng):
    weight = quantize(randn(170, 350, rng=rng), form)
    six, eight = pack(weight), pack(replace(weight, bits=8))
    (codes,), (wide,) = six.weights, eight.weights
    assert codes.panels.nbytes * 4 == wide.panels.nbytes * 3
    x = randn(40, 350, dtype=torch.bfloat16, rng=rng)
    for rows in (1, 4, 9, 40):
        assert_same_bits(six(x[:rows], out_dtype=torch.float32), eight(x[:rows], out_dtype=torch.float32))


@pytest.mark.usefixtures("isa")
def test_gated_products_are_rounded_once(name, rng):
    gate, up = (quantize(randn(101, 150, rng=rng), name) for _ in range(2))
    x, bias = randn(40, 150, dtype=torch.bfloat16, rng=rng), randn(202, rng=rng)
    product = pack(gate, up)(x, bias, out_dtype=torch.float32)
    gated = FORM.pack_gated(KERNELS, gate, up)
    assert_same_bits(gated(x, bias, "silu"), gated_activation(KERNELS, product, "silu").bfloat16())
    part = FORM.pack_gated(KERNELS, *(one.select_rows(slice(40, 101)) for one in (gate, up)))
    assert_same_bits(part(x, None, "silu"), gated(x, None, "silu")[:, 40:].contiguous())


def test_threads_do_not_matter(name, rng):
    weight, x = quantize(randn(140, 300, rng=rng), name), randn(300, 300, dtype=torch.bfloat16, rng=rng)
    packed = pack(weight)
    alone = packed(x)
    for num_threads in (2, 3):
        _cpu.set_num_threads(num_threads)
        assert_same_bits(packed(x), alone)
        assert torch.equal(pack(weight).weights[0].panels, packed.weights[0].panels)
    _cpu.set_num_threads(1)


def test_codes_come_back(name, rng):
    weight = quantize(randn(70, 100, rng=rng), name)
    (packed,) = pack(weight).weights
    rows = torch.tensor([3, 69, 0])
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(packed.dequantize_rows(rows, dtype), weight.dequantize(dtype)[rows])
    codes = torch.empty_like(weight.values)
    _cpu.packed_codes(packed.panels, torch.arange(70), codes)
    assert torch.equal(codes, weight.values if packed.order is None else weight.values[:, packed.order.long()])


def test_the_best_output_is_the_first_largest(name, rng):
    head = FORM.pack_lm_head(KERNELS, quantize(randn(70, 96, rng=rng).repeat(2, 1), name))
    x = randn(20, 96, dtype=torch.bfloat16, rng=rng)
    assert_same_bits(head.argmax(x), find_best(KERNELS, head(x, out_dtype=torch.float32)))


@pytest.mark.usefixtures("isa")
def test_rows_of_experts_have_the_bits_of_one_linear(name, rng):
    experts = [[quantize(randn(70, 96, rng=rng), name) for _ in range(2)] for _ in range(3)]
    if name == "act_order":  # each expert has an order of its own
        experts = [
            [replace(part, group_of=part.group_of.roll(index)) for part in parts] for index, parts in enumerate(experts)
        ]
    assert FORM.keeps(KERNELS, experts[0], "expert")
    x, ids = randn(40, 96, dtype=torch.bfloat16, rng=rng), torch.rand(40, 3, generator=rng).topk(2)[1].int()
    biases = randn(3, 140, dtype=torch.bfloat16, rng=rng)
    stack = FORM.allocate_experts(KERNELS, 3, *experts[0])
    for index, parts in enumerate(experts):
        FORM.pack_expert(KERNELS, stack, index, *parts)
    whole, begin = expert_up(KERNELS, x, ids, stack, "silu", gated=True, bias=biases), 0
    for expert, parts in enumerate(experts):
        alone = gated_activation(KERNELS, pack(*parts)(x[(ids == expert).any(1)], biases[expert]), "silu")
        assert_same_bits(whole[begin : begin + len(alone)], alone)
        begin += len(alone)


W8A8 = fp8_w8a8.Format(packs_all=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("form", "how"),
    [
        ("fp8", {}),
        ("fp8", {"input_bound": 1.5}),
        ("fp8", {"input_scale": 0.004}),
        ("fp8_block", {}),
    ],
)
@pytest.mark.usefixtures("isa")
def test_fp8_products_may_round_x_too(form, how, dtype, rng):
    """Each row of x by itself, or each group of it; with the oracle's numbers, for any number of rows."""
    n, k = 150, 333
    weight = replace(quantize(randn(n, k, rng=rng), form), **how)
    x, bias = randn(31, k, dtype=dtype, rng=rng), randn(n, dtype=dtype, rng=rng)
    x[3], x[4, 7], x[5] = 0, torch.inf, 1e-30
    packed = W8A8.pack_linear(KERNELS, weight)
    whole = packed(x, out_dtype=torch.float32)
    exact = W8A8.multiply_reference(KERNELS, x, weight, None, torch.float64)
    assert whole[4].isnan().all() if form == "fp8" else whole[4].isnan().any()
    dense, rows = weight.dequantize(torch.float32).double(), [row for row in range(31) if row != 4]
    magnitude = x.double().abs() @ dense.abs().T + 1e-30
    assert float(((whole.double() - exact).abs() / magnitude)[rows].max()) < 2e-6
    assert float(((whole.double() - x.double() @ dense.T).abs() / magnitude)[6:].max()) > 1e-4
    for m in (1, 2, 7, 12, 13, 14):
        assert_same_bits(packed(x[-m:], out_dtype=torch.float32), whole[-m:])
    assert_same_bits(W8A8.pack_linear(KERNELS, weight.select_rows(slice(70, n)))(x, None), packed(x)[:, 70:])
    assert_same_bits(packed(x[6:], bias), (whole[6:] + bias.float()).to(dtype))
    gated = W8A8.pack_gated(KERNELS, *(weight.select_rows(rows) for rows in (slice(75), slice(75, n))))
    assert_same_bits(gated(x[6:], bias, "silu"), gated_activation(KERNELS, whole[6:] + bias.float(), "silu").to(dtype))
    assert_same_bits(packed.argmax(x[6:]), find_best(KERNELS, whole[6:]))


def test_weights_that_are_not_quantized_become_fp8(rng):
    form, x = weight_format("fp8_w8a8"), randn(9, 96, dtype=torch.bfloat16, rng=rng)
    weight = randn(150, 96, dtype=torch.bfloat16, rng=rng)
    packed = form.pack_linear(KERNELS, weight[:64], weight[64:])
    expected = form.multiply_reference(KERNELS, x, weight, None, torch.float32)
    assert_close(packed(x, out_dtype=torch.float32), expected, scale=x.double().abs() @ weight.double().abs().T)
    assert packed.nbytes < 150 * 96 * 2
    assert form.pack_lm_head(KERNELS, weight).input_form == "quantized"


def test_experts_may_round_x_too(rng):
    """Each with a scale of its own, if it is fixed."""
    weights = [replace(quantize(randn(140, 96, rng=rng), "fp8"), input_scale=scale) for scale in (0.0, 0.01, 0.02)]
    x = randn(40, 96, dtype=torch.bfloat16, rng=rng)
    ids = torch.rand(40, 3, generator=rng).topk(2)[1].to(torch.int32)
    experts = W8A8.allocate_experts(KERNELS, 3, weights[0])
    for index, weight in enumerate(weights):
        W8A8.pack_expert(KERNELS, experts, index, weight.select_rows(slice(7)), weight.select_rows(slice(7, 140)))
    whole, begin = expert_up(KERNELS, x, ids, experts, "silu", gated=True), 0
    for expert, weight in enumerate(weights):
        rows = x[(ids == expert).any(1)]
        alone = gated_activation(KERNELS, W8A8.pack_linear(KERNELS, weight)(rows), "silu")
        assert_same_bits(whole[begin : begin + len(rows)], alone)
        begin += len(rows)


def test_parts_with_unlike_scales_of_x_are_multiplied_apart(rng):
    weight, x = quantize(randn(150, 96, rng=rng), "fp8"), randn(9, 96, dtype=torch.bfloat16, rng=rng)
    parts = [
        replace(weight.select_rows(rows), input_scale=scale)
        for rows, scale in ((slice(40), 0.01), (slice(40, 150), 0.02))
    ]
    both = W8A8.pack_linear(KERNELS, *parts)
    assert_same_bits(both(x), torch.cat([W8A8.pack_linear(KERNELS, part)(x) for part in parts], 1))
    gate, up = (
        replace(part.select_rows(slice(40)), input_scale=scale) for part, scale in zip(parts, (0.01, 0.02), strict=True)
    )
    alone = torch.cat([W8A8.pack_linear(KERNELS, part)(x) for part in (gate, up)], 1)
    assert_same_bits(W8A8.pack_gated(KERNELS, gate, up)(x, None, "silu"), gated_activation(KERNELS, alone, "silu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_8_bit_integers_of_a_file_have_its_own_bytes(dtype, rng):
    """And the products of `int8`: with a scale per row, rows of x are quantized too."""
    values, scales = torch.randint(-128, 128, (150, 77), generator=rng), torch.rand(150, 1, generator=rng) + 0.1
    weight = GroupedWeight(
        (values + 128).byte(),
        scales,
        torch.zeros(77, dtype=torch.int64),
        zeros=torch.full((150, 1), 128, dtype=torch.uint8),
        bits=8,
        quantizes_input=True,
    )
    x, bias = randn(40, 77, dtype=dtype, rng=rng), randn(150, dtype=dtype, rng=rng)
    rows = quantize_rows_reference(x)
    sums = rows.values[:, :77].long() @ values.T
    expected = sums.float() * (rows.scales[:, None] * scales[:, 0])
    parts = [weight.select_rows(rows) for rows in (slice(7), slice(7, 7), slice(7, 150))]
    packed = FORM.pack_linear(KERNELS, *parts)
    assert packed.input_form == "quantized"
    assert_same_bits(packed(x, out_dtype=torch.float32), expected)
    assert_same_bits(packed(x, bias), (expected + bias.float()).to(dtype))
    gated = FORM.pack_gated(KERNELS, weight.select_rows(slice(75)), weight.select_rows(slice(75, 150)))
    assert_same_bits(gated(x, bias, "silu"), gated_activation(KERNELS, expected + bias.float(), "silu").to(dtype))
    experts = FORM.allocate_experts(KERNELS, 2, weight)
    for index in range(2):
        FORM.pack_expert(KERNELS, experts, index, *parts)
    ids = torch.ones(40, 1, dtype=torch.int32)
    assert_same_bits(
        expert_up(KERNELS, x, ids, experts, "silu", gated=True), gated_activation(KERNELS, expected.to(dtype), "silu")
    )


def test_parts_of_unlike_forms_are_multiplied_apart(rng):
    parts = [quantize(randn(rows, 96, rng=rng), form) for rows, form in ((70, "q4_k"), (30, "q4_k"), (40, "q6_k"))]
    x, packed = randn(9, 96, dtype=torch.bfloat16, rng=rng), pack(*parts)
    assert len(packed.weights) == 2
    for bias in (randn(140, rng=rng), randn(9, 140, rng=rng), randn(9, 2, 140, rng=rng)):  # the latter for adapters
        alone = [pack(part)(x, some) for part, some in zip(parts, bias.split([70, 30, 40], -1), strict=True)]
        assert_same_bits(packed(x, bias), torch.cat(alone, dim=1))
    gated = FORM.pack_gated(KERNELS, parts[1], quantize(randn(30, 96, rng=rng), "q6_k"))
    assert gated(x, None, "silu").shape == (9, 30)


def test_a_weight_with_odd_groups_is_not_kept(rng):
    weight = quantize(randn(8, 96, rng=rng), "q4_0")
    odd = replace(weight, group_of=torch.arange(96) // 36)
    assert not FORM.keeps(KERNELS, [odd], "layer")


def test_bytes_are_those_of_the_codes_and_scales(rng):
    packed = pack(quantize(randn(64, 128, rng=rng), "q4_0"))
    assert packed.nbytes == 64 * (128 // 2 + 2 * 4)
    assert FORM.pack_linear(KERNELS, randn(64, 128, rng=rng)).nbytes == weight_format("plain").num_bytes(64, 128, 4)


def test_wrong_tensors_are_refused(rng):
    (packed,) = pack(quantize(randn(64, 128, rng=rng), "awq")).weights
    x, out = randn(2, 128, rng=rng), torch.empty(2, 64)
    for size in (0, 36, 4):
        with pytest.raises(ValueError, match="a group has a multiple of 8 columns"):
            _cpu.linear_grouped(x, None, packed.panels, packed.scales, None, packed.zeros, None, size, None, out)
    with pytest.raises(ValueError, match="scales has shape"):
        _cpu.linear_grouped(x, None, packed.panels, packed.scales, None, packed.zeros, None, 32, None, out)
    with pytest.raises(ValueError, match="x has 100 features"):
        packed.multiply(x[:, :100], None, out)
    weight = quantize(randn(8, 64, rng=rng), "awq")
    with pytest.raises(ValueError, match="a zero point of 4-bit codes is 17"):
        pack(replace(weight, zeros=torch.full((8, 1), 17, dtype=torch.uint8)))


def test_rows_that_are_read_later_are_packed_alike(name, rng, monkeypatch):
    """Slices end within panels, and the parts of a stack begin there."""
    monkeypatch.setattr(slices, "_SLICE_ELEMENTS", 64 * 100)
    parts = [quantize(randn(rows, 100, rng=rng), name) for rows in (70, 150)]
    later = [_read_later(part) for part in parts]
    assert all(part.reader is not None for part in later)
    for one, other in zip(pack(*later).weights, pack(*parts).weights, strict=True):
        assert_same_panels(one, other)
    gated = [FORM.pack_gated(KERNELS, both[1], both[1].select_rows(slice(None))) for both in (later, parts)]
    assert_same_panels(*(one.weight for one in gated if isinstance(one, GroupedGatedLinear)))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(later[1].dequantize(dtype), parts[1].dequantize(dtype))


def _read_later(weight: GroupedWeight) -> GroupedWeight:
    def read(rows: Span) -> GroupedWeight:
        return weight.select_rows(slice(rows.start, rows.stop))

    return slices.read_in_slices(read, Span(0, len(weight)), weight.values.shape[1], read_zeros=lambda: weight.zeros)
