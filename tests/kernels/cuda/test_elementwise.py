"""Norms, activations, rope, soft cap, KV writes: each against the oracle of its op."""

from __future__ import annotations

import pytest
import torch

from shardline.kernels.pages import tokens_of
from shardline.runtime.ops.activation import activation_reference, gated_activation_reference
from shardline.runtime.ops.attention.kv_cache import write_kv_reference
from shardline.runtime.ops.attention.rope import apply_rope_reference, rotary_table
from shardline.runtime.ops.norm import layer_norm_reference, rms_norm_reference
from shardline.runtime.ops.sampling.softcap import softcap_reference
from tests.kernels.cuda.helpers import KERNELS
from tests.runtime.ops.helpers import KERNELS as HOST_KERNELS
from tests.runtime.ops.helpers import assert_close, assert_same_bits, randn, write_kv


@pytest.mark.parametrize("width", [1, 5, 130, 1024])
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_rms_norm(rng, width, weight_offset):
    x, weight, out = randn(7, width, rng=rng), randn(width, rng=rng), torch.full((7, width), torch.nan)
    KERNELS.rms_norm(x, weight, out, 1e-6, weight_offset, None, None)
    assert_close(out, rms_norm_reference(x, weight, 1e-6, weight_offset=weight_offset))


@pytest.mark.parametrize("width", [5, 130])
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm(rng, width, with_bias):
    x, weight, out = randn(7, width, rng=rng) + 3, randn(width, rng=rng), torch.full((7, width), torch.nan)
    bias = randn(width, rng=rng) if with_bias else None
    KERNELS.layer_norm(x, weight, bias, out, 1e-5, None, None)
    assert_close(out, layer_norm_reference(x, weight, bias, 1e-5), scale=10 * (weight.double().abs() + 1))


def test_norm_of_a_sum_is_the_norm_after_the_addition(rng):
    wide, residual, weight = randn(5, 300, rng=rng), randn(5, 200, rng=rng), randn(200, rng=rng)
    x = wide[:, 50:250]  # strided rows
    normed, summed, alone = (torch.full((5, 200), torch.nan) for _ in range(3))
    KERNELS.rms_norm(x, weight, normed, 1e-6, 0.0, residual, summed)
    assert_same_bits(summed, x + residual)
    KERNELS.rms_norm(summed, weight, alone, 1e-6, 0.0, None, None)
    assert_same_bits(normed, alone)
    KERNELS.layer_norm(x, weight, weight, normed, 1e-6, residual, summed)
    assert_same_bits(summed, x + residual)
    assert_close(normed, layer_norm_reference(summed, weight, weight, 1e-6), scale=10 * (weight.double().abs() + 1))


def test_norm_of_heads(rng):
    qkv, weight, out = randn(4, 6, 40, rng=rng), randn(32, rng=rng), torch.full((4, 3, 32), torch.nan)
    heads = qkv[:, 2:5, 8:]  # strides of tokens and heads are free
    KERNELS.rms_norm(heads, weight, out, 1e-6, 0.0, None, None)
    assert_close(out, rms_norm_reference(heads.contiguous(), weight, 1e-6))


def test_add(rng):
    x, y, out = randn(3, 700, rng=rng), randn(3, 700, rng=rng), torch.full((3, 700), torch.nan)
    KERNELS.add(x, y, out)
    assert_same_bits(out, x + y)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_swish"])
def test_activation(rng, name):
    gate_up = 4 * randn(3, 2 * 1100, rng=rng)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -9.0, 0.0])
    out = torch.full((3, 1100), torch.nan)
    KERNELS.activation(gate_up, out, name, True)
    assert_close(out, gated_activation_reference(gate_up, name), scale=4.0)
    KERNELS.activation(gate_up[:, 1100:], out, name, False)
    assert_close(out, activation_reference(gate_up[:, 1100:], name), scale=4.0)


@pytest.mark.parametrize("cap", [5.0, 50.0])
def test_softcap(rng, cap):
    wide = 20 * randn(3, 1300, rng=rng)
    wide[0, :3] = torch.tensor([1e-4, -0.7, 1e4])
    logits = wide[:, :1200]
    expected = softcap_reference(logits, cap)
    KERNELS.softcap(logits, cap)
    assert_close(logits, expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rot", "dim"), [(16, 24), (32, 32), (6, 10)])
def test_rope(rng, interleaved, rot, dim):
    qkv = randn(5, 6, dim, rng=rng)
    table, positions = rotary_table(torch.rand(rot // 2, generator=rng), 100), torch.tensor([0, 5, 99, 3, 7])
    expected = apply_rope_reference(qkv[:, :3], positions, table, interleaved=interleaved)
    KERNELS.apply_rope(qkv[:, :3], positions, table, interleaved)
    assert_close(qkv[:, :3].contiguous(), expected, scale=4.0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rot", "dim"), [(16, 24), (32, 32)])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_rope_and_write_kv_is_one_after_the_other(rng, interleaved, rot, dim, as_bytes):
    qkv = randn(5, 9, dim, rng=rng)
    table, positions = rotary_table(torch.rand(rot // 2, generator=rng), 100), torch.tensor([0, 5, 99, 3, 7])
    slots = torch.tensor([33, 0, -1, 63, 16])
    caches = [torch.zeros(4, 2, 16, dim, dtype=torch.int8 if as_bytes else qkv.dtype) for _ in range(4)]
    scales = [torch.zeros(4, 2, 16) if as_bytes else None for _ in range(4)]
    parts = qkv.clone()
    for heads in (parts[:, :5], parts[:, 5:7]):
        KERNELS.apply_rope(heads, positions, table, interleaved)
    write_kv_reference(
        parts[:, 5:7], parts[:, 7:], caches[2], caches[3], slots, key_scales=scales[2], value_scales=scales[3]
    )
    KERNELS.rope_and_write_kv(
        qkv[:, :5], qkv[:, 5:7], qkv[:, 7:], caches[0], caches[1], positions, slots, table, interleaved, *scales[:2]
    )
    assert_same_bits(qkv, parts)
    for actual, expected in zip((*caches[:2], *scales[:2]), (*caches[2:], *scales[2:]), strict=True):
        if actual is None or expected is None:
            assert actual is expected
        else:
            assert torch.equal(actual, expected)


def test_write_kv(rng):
    kv = randn(9, 2, 3, 20, rng=rng)
    slots = torch.randperm(8 * 16, generator=rng)[:9]
    slots[4] = -1
    caches = [torch.zeros(8, 3, 16, 20) for _ in range(4)]
    KERNELS.write_kv(kv[:, 0], kv[:, 1], caches[0], caches[1], slots)
    write_kv_reference(kv[:, 0], kv[:, 1], caches[2], caches[3], slots)
    assert_same_bits(caches[0], caches[2])
    assert_same_bits(caches[1], caches[3])


def test_write_kv_as_bytes(rng):
    kv = randn(9, 2, 3, 20, rng=rng)
    kv[2, 0, 1], kv[3, 1, 0, 4], kv[5, 0, 2, 7] = 0.0, torch.nan, torch.inf
    slots = torch.randperm(8 * 16, generator=rng)[:9]
    slots[4] = -1
    caches = [torch.zeros(8, 3, 16, 20, dtype=torch.int8) for _ in range(4)]
    scales = [torch.zeros(8, 3, 16) for _ in range(4)]
    KERNELS.write_kv(kv[:, 0], kv[:, 1], caches[0], caches[1], slots, scales[0], scales[1])
    write_kv(
        HOST_KERNELS, kv[:, 0], kv[:, 1], caches[2], caches[3], slots, key_scales=scales[2], value_scales=scales[3]
    )
    order = HOST_KERNELS.page_order(torch.float32)
    assert torch.equal(caches[0], tokens_of(caches[2], "keys", order))
    assert torch.equal(caches[1], tokens_of(caches[3], "values", order))
    for ours, theirs in zip(scales[:2], scales[2:], strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert_same_bits(ours.nan_to_num(), theirs.nan_to_num())


def test_write_kv_as_fp8(rng):
    kv = randn(9, 2, 3, 20, rng=rng)
    kv[2, 0, 1], kv[3, 1, 0, 4], kv[5, 0, 2, 7], kv[6, 0, 0] = 0.0, torch.nan, torch.inf, 1e-38
    slots = torch.randperm(8 * 16, generator=rng)[:9]
    slots[4] = -1
    caches = [torch.zeros(8, 3, 16, 20, dtype=torch.float8_e4m3fn) for _ in range(4)]
    scales = [torch.zeros(8, 3, 16) for _ in range(4)]
    KERNELS.write_kv(kv[:, 0], kv[:, 1], caches[0], caches[1], slots, scales[0], scales[1])
    write_kv_reference(kv[:, 0], kv[:, 1], caches[2], caches[3], slots, key_scales=scales[2], value_scales=scales[3])
    for ours, theirs in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    for ours, theirs in zip(scales[:2], scales[2:], strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert_same_bits(ours.nan_to_num(), theirs.nan_to_num())
