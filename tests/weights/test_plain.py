from __future__ import annotations

import pytest
import torch

from shardline import _cpu
from shardline.weights.formats.plain import Format
from tests.ops.helpers import KERNELS, assert_close, assert_same_bits, randn

PLAIN = Format()


@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 64), (3, 77, 100), (6, 1, 1), (13, 1500, 65), (250, 600, 130)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("isa")
def test_matches_reference(dtype, rng, m, k, n, with_bias):
    x, weight = randn(m, k, dtype=dtype, rng=rng), randn(n, k, dtype=dtype, rng=rng)
    bias = randn(n, dtype=dtype, rng=rng) if with_bias else None
    scale = x.double().abs() @ weight.double().abs().T + 1
    packed = PLAIN.pack_linear(KERNELS, weight)
    for out_dtype in (dtype, torch.float32):
        actual = packed(x, bias, out_dtype=out_dtype)
        assert_close(actual, PLAIN.multiply_reference(KERNELS, x, weight, bias, out_dtype), scale=scale)


@pytest.mark.usefixtures("isa")
def test_a_row_does_not_depend_on_the_batch(dtype, rng):
    k, n = 150, 70
    weight, bias = PLAIN.pack_linear(KERNELS, randn(n, k, dtype=dtype, rng=rng)), randn(n, dtype=dtype, rng=rng)
    x = randn(4096, k, dtype=dtype, rng=rng)
    whole = weight(x, bias)
    for m in [*range(1, 258), 1024]:
        assert_same_bits(weight(x[:m], bias), whole[:m])
    for start in (1, 5, 239, 4095):
        assert_same_bits(weight(x[start : start + 1], bias), whole[start : start + 1])


@pytest.mark.usefixtures("isa")
def test_a_column_does_not_depend_on_the_shard(dtype, rng):
    k, n = 1100, 200  # more than one block of K
    weight, x = randn(n, k, dtype=dtype, rng=rng), randn(9, k, dtype=dtype, rng=rng)
    whole = PLAIN.pack_linear(KERNELS, weight)(x)
    for begin, end in [(0, 1), (0, 67), (67, 134), (134, 200), (199, 200), (63, 129)]:
        assert_same_bits(PLAIN.pack_linear(KERNELS, weight[begin:end])(x), whole[:, begin:end])


@pytest.mark.usefixtures("isa")
def test_threads_do_not_matter(dtype, rng):
    weight, x = PLAIN.pack_linear(KERNELS, randn(500, 300, dtype=dtype, rng=rng)), randn(600, 300, dtype=dtype, rng=rng)
    alone = weight(x)
    for num_threads in (2, 3):
        _cpu.set_num_threads(num_threads)
        assert_same_bits(weight(x), alone)
    _cpu.set_num_threads(1)


def test_strided_input_and_output(dtype, rng):
    wide = randn(7, 90, dtype=dtype, rng=rng)
    weight = PLAIN.pack_linear(KERNELS, randn(33, 40, dtype=dtype, rng=rng))
    out = torch.zeros(7, 50, dtype=dtype)
    KERNELS.linear(wide[:, 20:60], weight.panels, None, out[:, 10:43])
    assert_same_bits(out[:, 10:43].contiguous(), weight(wide[:, 20:60].contiguous()))
    assert (out[:, :10] == 0).all()
    assert (out[:, 43:] == 0).all()


@pytest.mark.usefixtures("isa")
def test_one_rounding_to_bf16_is_torchs(rng):
    bits = torch.randint(-(2**31), 2**31, (64, 64), generator=rng, dtype=torch.int64).to(torch.int32)
    bits[::2] &= 0x007FFFFF  # subnormal numbers
    bits[1::4] &= ~0xFFFF
    bits[1::4] |= 0x8000  # ties
    x = bits.view(torch.float32)
    x[~x.isfinite()] = 1.0
    one = PLAIN.pack_linear(KERNELS, torch.ones(1, 1))
    alone = torch.stack([one(x[:, i : i + 1], out_dtype=torch.bfloat16) for i in range(64)])
    assert_same_bits(alone[:, :, 0].T, x.to(torch.bfloat16))


def test_no_rows(dtype):
    assert PLAIN.pack_linear(KERNELS, torch.ones(5, 8, dtype=dtype))(torch.empty(0, 8, dtype=dtype)).shape == (0, 5)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(2, 9), ValueError, "features"),
        (torch.ones(2, 8, dtype=torch.bfloat16), TypeError, "x is bfloat16 but panels is float32"),
        (torch.ones(2, 8, dtype=torch.float64), TypeError, "float32 or bfloat16"),
        (torch.ones(8, 2).T, ValueError, "contiguous"),
        (torch.ones(2, 8, device="meta"), TypeError, "CPU"),
    ],
)
def test_wrong_inputs_are_named(x, error, message):
    with pytest.raises(error, match=message):
        PLAIN.pack_linear(KERNELS, torch.ones(5, 8))(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(200, 31), (64, 8), (130, 32)])
def test_rows_come_back_as_they_were(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).to(dtype)
    indices = torch.tensor([0, shape[0] - 1, 63, 5, 5])
    assert torch.equal(PLAIN.pack_linear(KERNELS, weight).unpack_rows(indices), weight[indices])


def test_rows_outside_the_weight_are_refused() -> None:
    weight = PLAIN.pack_linear(KERNELS, torch.ones(64, 8))
    for index in (-1, 64):
        with pytest.raises(ValueError, match="outside the weight"):
            weight.unpack_rows(torch.tensor([3, index]))
