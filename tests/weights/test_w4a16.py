"""What int4 and int8_w8a16 keep of a weight; test_contract.py has the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardline.weights.base import weight_format
from shardline.weights.formats.int4 import Format as Int4
from shardline.weights.formats.int8_w8a16 import Format as Int8
from shardline.weights.grouped import GroupedWeight
from tests.runtime.ops.helpers import KERNELS, randn
from tests.weights import test_int4_fast


def restored(form: Int8, weight: Tensor) -> Tensor:
    return form.quantize(KERNELS, weight).dequantize(torch.float32)


def error(kept: Tensor, weight: Tensor) -> float:
    return float((kept - weight).norm() / weight.norm())


@pytest.mark.usefixtures("isa")
def test_errors_on_gaussian_weights(rng):
    weight = randn(200, 1024, rng=rng)
    assert error(restored(Int4(), weight), weight) < 0.073
    assert error(restored(Int8(), weight), weight) < 0.006


@pytest.mark.usefixtures("isa")
def test_bytes_are_the_nearest_of_their_scales(dtype, rng):
    weight = randn(20, 77, dtype=dtype, rng=rng)
    held = Int8().quantize(KERNELS, weight)
    for group, columns in enumerate((slice(0, 32), slice(32, 64), slice(64, 77))):
        values = weight[:, columns].float()
        scale = (values.abs().amax(1) / 127).bfloat16()
        assert torch.equal(held.scales[:, group], scale)
        expected = (values * (1 / scale.float())[:, None]).round().clamp(-127, 127) + 128
        assert torch.equal(held.values[:, columns], expected.byte())


@pytest.mark.parametrize(("role", "bits"), [("key_value", 8), ("attention", 6), ("down", 6)])
def test_int4_holds_what_errors_cost_most_in_more_bits(role, bits, dtype, rng):
    """Codes are the nearest ones of the scale in bf16 that reaches the largest magnitude of 32 neighbours."""
    weight, form = randn(300, 77, dtype=dtype, rng=rng), Int4()
    held = form.hold(KERNELS, weight, role)
    assert isinstance(held, GroupedWeight)
    assert held.bits == bits
    middle = 1 << bits - 1
    for group, columns in enumerate((slice(0, 32), slice(32, 64), slice(64, 77))):
        values = weight[:, columns].float()
        scale = (values.abs().amax(1) / (middle - 1)).bfloat16()
        assert torch.equal(held.scales[:, group], scale)
        expected = (values * (1 / scale.float())[:, None]).round().clamp(1 - middle, middle - 1) + middle
        assert torch.equal(held.values[:, columns], expected.byte())
    assert error(held.dequantize(torch.float32), weight.float()) < {8: 0.006, 6: 0.022}[bits]
    assert form.num_bytes(300, 77, 2, role) == 300 * (-(-77 * bits // 8) + 3 * 2)
    assert form.hold(KERNELS, weight, "layer") is weight


@pytest.mark.usefixtures("isa")
def test_parts_in_more_bits_have_the_bits_that_they_have_alone(dtype, rng):
    """q in 6 bits beside k and v in 8, as a layer packs them, and alone."""
    form, x = Int4(), randn(19, 96, dtype=dtype, rng=rng)
    q, k, v = (randn(rows, 96, dtype=dtype, rng=rng) for rows in (70, 20, 20))
    query = form.hold(KERNELS, q, "attention")
    held = [query, *(form.hold(KERNELS, part, "key_value") for part in (k, v))]
    alone = [form.pack_linear(KERNELS, part)(x) for part in held]
    assert torch.equal(form.pack_linear(KERNELS, *held)(x), torch.cat(alone, 1))
    assert isinstance(query, GroupedWeight)
    packed = form.pack_linear(KERNELS, query)
    assert torch.equal(packed(x)[3:5], packed(x[3:5]))
    assert error(packed(x).float(), x.float() @ query.dequantize(torch.float32).T) < 0.01


@pytest.mark.usefixtures("isa")
def test_few_lines_fit_a_group_better(rng):
    """Against all lines of a fine grid, which levels would have to round."""
    weight = randn(64, 32, rng=rng)
    low, high = weight.amin(1), weight.amax(1)
    best = torch.full((64,), torch.inf)
    for cut in torch.linspace(-0.02, 0.1, 13):
        for width in torch.linspace(0.75, 1.05, 31):
            start, step = low + cut * (high - low), width * (high - low) / 15
            codes = ((weight - start[:, None]) / step[:, None]).round().clamp(0, 15)
            best = best.minimum((codes * step[:, None] + start[:, None] - weight).square().sum(1))
    found = (restored(Int4(), weight) - weight).square().sum(1)
    assert found.sum() < 1.1 * best.sum()
    assert (found < 1.6 * best).all()


def test_columns_with_outliers_cost_their_group_only(rng):
    weight = randn(200, 1024, rng=rng)
    weight[:, ::256] *= 50
    usual = (torch.arange(1024) // 32) % 8 != 0
    kept = restored(Int4(), weight)
    assert error(kept[:, usual], weight[:, usual]) < 0.14
    kept = test_int4_fast.restored(weight)
    assert error(kept[:, usual], weight[:, usual]) > 0.18, "all groups of a row share a scale"


def test_weights_on_a_grid_of_16_values_a_group_are_kept(rng):
    """As those of a model that was made from GGUF's Q4_1. Symmetric levels lose what any weights lose."""
    codes = torch.randint(0, 16, (200, 8, 32), generator=rng)
    codes[..., 0], codes[..., 1] = 0, 15
    scale, low = torch.rand(2, 200, 8, 1, generator=rng) + 0.5
    weight = (codes * scale - 8 * low).flatten(1).bfloat16().float()
    assert error(restored(Int4(), weight), weight) < 0.01
    assert error(test_int4_fast.restored(weight), weight) > 0.05


def test_equal_weights_zeros_and_a_short_last_group(dtype):
    weight = torch.full((3, 40), 0.25, dtype=dtype)
    weight[1], weight[2, 32:] = 0, -3
    for form in (Int4(), Int8()):
        assert (restored(form, weight) - weight.float()).abs().max() <= 3 / 254, "half a level of the row's minimums"
        assert (restored(form, weight)[1] == 0).all()


@pytest.mark.parametrize("role", ["key_value", "attention"])
def test_zeros_and_what_is_not_finite_in_more_bits(role, rng):
    weight = randn(4, 64, rng=rng)
    weight[0, :32], weight[1, 7], weight[2, 40] = 0, float("nan"), float("-inf")
    held = Int4().hold(KERNELS, weight, role)
    assert isinstance(held, GroupedWeight)
    kept = held.dequantize(torch.float32)
    assert (kept[0, :32] == 0).all()
    assert kept.isnan().any(1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("name", ["int4", "int8_w8a16"])
def test_what_is_not_finite_makes_its_output_nan(name, dtype, rng):
    x, weight = randn(4, 50, dtype=dtype, rng=rng), randn(70, 50, dtype=dtype, rng=rng)
    weight[3, 7], weight[40, 9], weight[66, 9] = float("nan"), float("inf"), float("-inf")
    out = weight_format(name).pack_linear(KERNELS, weight)(x, out_dtype=torch.float32)
    assert torch.equal(out.isnan().all(0), ~weight.isfinite().all(1))
    assert torch.equal(out.isnan().any(0), ~weight.isfinite().all(1))
