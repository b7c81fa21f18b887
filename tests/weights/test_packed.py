"""Weights that stay as a checkpoint packs them: every form, against the dequantized weight, and bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardline import _cpu
from shardline.models.partition import Span
from shardline.runtime.backends.host.grouped import (
    GroupedGatedLinear,
    GroupedLinear,
    GroupedPanels,
    unpack_codes,
)
from shardline.runtime.loader import slices
from shardline.runtime.ops.activation import gated_activation
from shardline.runtime.ops.moe.experts import expert_up
from shardline.runtime.ops.sampling.sample import find_best
from shardline.weights.base import weight_format
from shardline.weights.formats.packed import Format
from shardline.weights.grouped import GroupedWeight
from tests.ops.helpers import KERNELS, assert_same_bits, randn
from tests.weights.forms import FORMS, quantize

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
    codes = weight.values if packed.order is None else weight.values[:, packed.order.long()]
    assert torch.equal(unpack_codes(packed.panels, 70, 100), codes)


def test_the_best_output_is_the_first_largest(name, rng):
    head = FORM.pack_lm_head(KERNELS, quantize(randn(70, 96, rng=rng).repeat(2, 1), name))
    x = randn(20, 96, dtype=torch.bfloat16, rng=rng)
    assert_same_bits(head.argmax(x), find_best(KERNELS, head(x, out_dtype=torch.float32)))


@pytest.mark.usefixtures("isa")
def test_rows_of_experts_have_the_bits_of_one_linear(name, rng):
    experts = [[quantize(randn(70, 96, rng=rng), name) for _ in range(2)] for _ in range(3)]
    if not FORM.keeps(KERNELS, experts[0], "expert"):
        assert name == "act_order"
        return
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


def test_parts_of_unlike_forms_are_multiplied_apart(rng):
    parts = [quantize(randn(rows, 96, rng=rng), form) for rows, form in ((70, "q4_k"), (30, "q4_k"), (40, "q6_k"))]
    x, bias = randn(9, 96, dtype=torch.bfloat16, rng=rng), randn(140, rng=rng)
    packed = pack(*parts)
    assert len(packed.weights) == 2
    alone = [pack(part)(x, some) for part, some in zip(parts, bias.split([70, 30, 40]), strict=True)]
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
    # The form of several zero points depends on all of them.
    assert all((part.reader is None) == (part.zeros is not None) for part in later)
    for one, other in zip(pack(*later).weights, pack(*parts).weights, strict=True):
        _assert_same_panels(one, other)
    gated = [FORM.pack_gated(KERNELS, both[1], both[1].select_rows(slice(None))) for both in (later, parts)]
    _assert_same_panels(*(one.weight for one in gated if isinstance(one, GroupedGatedLinear)))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(later[1].dequantize(dtype), parts[1].dequantize(dtype))


def _read_later(weight: GroupedWeight) -> GroupedWeight:
    def read(rows: Span) -> GroupedWeight:
        return weight.select_rows(slice(rows.start, rows.stop))

    return slices.read_in_slices(read, Span(0, len(weight)), weight.values.shape[1])


def _assert_same_panels(one: GroupedPanels, other: GroupedPanels) -> None:
    for mine, theirs in zip(vars(one).values(), vars(other).values(), strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert mine == theirs
