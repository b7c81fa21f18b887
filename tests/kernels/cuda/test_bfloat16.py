"""Roundings of the kernels in bf16, where the interpreter has the hardware's (see conftest)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardline.runtime.ops.activation import gated_activation_reference
from shardline.runtime.ops.attention.paged import paged_attention_reference
from shardline.runtime.ops.moe.experts import expert_down, expert_up
from shardline.runtime.ops.norm import rms_norm_reference
from shardline.weights.rows import quantize_rows_reference
from tests.kernels.cuda.helpers import KERNELS, linear_reference, pack_experts
from tests.kernels.cuda.test_attention import STORED, in_one, spread
from tests.runtime.ops.attention.test_paged import attend, random_sequence
from tests.runtime.ops.helpers import KERNELS as HOST_KERNELS
from tests.runtime.ops.helpers import assert_close, assert_same_bits, randn
from tests.runtime.ops.moe.test_experts import choose

BF16 = torch.bfloat16


def test_norm_after_addition(rng):
    x, residual, weight = (randn(*shape, dtype=BF16, rng=rng) for shape in ((9, 300), (9, 300), (300,)))
    for offset in (0.0, 1.0):
        out, summed = torch.empty(9, 300, dtype=BF16), torch.empty(9, 300, dtype=BF16)
        KERNELS.rms_norm(x, weight, out, 1e-6, offset, residual, summed)
        assert_same_bits(summed, x + residual)
        assert_close(out, rms_norm_reference(summed, weight, 1e-6, weight_offset=offset))


def test_activation(rng):
    x, out = randn(9, 400, dtype=BF16, rng=rng), torch.empty(9, 200, dtype=BF16)
    KERNELS.activation(x, out, "silu", True)
    assert_close(out, gated_activation_reference(x, "silu"))


def test_linear(rng):
    x, weight, bias = (randn(*shape, dtype=BF16, rng=rng) for shape in ((9, 200), (70, 200), (70,)))
    for dtype in (BF16, torch.float32):
        out = torch.empty(9, 70, dtype=dtype)
        KERNELS.linear(x, weight, bias, out)
        assert_close(out, linear_reference(x, weight, bias, out_dtype=dtype), scale=200**0.5)


def test_gated_linear(rng):
    x, weight, bias = (randn(*shape, dtype=BF16, rng=rng) for shape in ((9, 200), (70, 200), (70,)))
    both, expected, out = (torch.empty(9, width, dtype=BF16) for width in (70, 35, 35))
    KERNELS.linear(x, weight, bias, both)
    KERNELS.activation(both, expected, "silu", True)
    KERNELS.linear(x, weight, bias, out, "silu")
    assert_same_bits(out, expected)


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_attention(rng, stored):
    batch = [
        (random_sequence(rng, end, BF16, heads=4, kv_heads=2, dim=32), begin, end)
        for begin, end in [(0, 9), (515, 518)]
    ]
    expected = attend(batch, stored=stored, poison=False, op=paged_attention_reference)
    serial, parallel = attend(batch, stored=stored, op=in_one), attend(batch, stored=stored, op=spread)
    for s, p, e in zip(serial, parallel, expected, strict=True):
        # Weights meet the values in bf16, as in other flash kernels.
        assert (s.double() - e.double()).norm() < 5e-3 * e.double().norm()
        assert_same_bits(p, s)


def test_experts(rng):
    """Rounded where the CPU rounds: the product, the gate, the gated product; a slot's product; the sum."""
    x, ids, weights = randn(9, 40, dtype=BF16, rng=rng), choose(9, 3, 2, rng), torch.rand(9, 2, generator=rng)
    up, down = (randn(*shape, dtype=BF16, rng=rng) * 0.15 for shape in ((3, 2 * 24, 40), (3, 40, 24)))
    shared = randn(9, 40, dtype=BF16, rng=rng)
    cpu_up, cpu_down = (pack_experts(HOST_KERNELS, part) for part in (up, down))
    cpu_rows = expert_up(HOST_KERNELS, x, ids, cpu_up, "silu", gated=True)
    extra: dict[str, Any] = {"shared": shared, "shared_scale": weights[:, 1].contiguous()}
    expected = expert_down(HOST_KERNELS, cpu_rows, ids, weights, cpu_down, **extra)
    rows, out = torch.empty(18, 24, dtype=BF16), torch.empty(9, 40, dtype=BF16)
    KERNELS.expert_up(x, ids, 0, False, up, None, "silu", True, rows)
    KERNELS.expert_down(rows, ids, weights, 0, down, None, shared, weights[:, 1].contiguous(), out)
    by_expert = torch.cat([rows[(ids == expert).flatten()] for expert in range(3)])
    assert (by_expert.double() - cpu_rows.double()).norm() < 1e-3 * cpu_rows.double().norm()
    assert (out.double() - expected.double()).norm() < 1e-3 * expected.double().norm()


def test_rows_as_bytes(rng):
    x = randn(5, 70, dtype=BF16, rng=rng)
    expected = quantize_rows_reference(x)
    values, scales = torch.empty_like(expected.values), torch.empty_like(expected.scales)
    KERNELS.quantize_rows(x, values, scales, None)
    assert torch.equal(values, expected.values)
    assert_same_bits(scales, expected.scales)
