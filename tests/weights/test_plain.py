"""What plain weights have of their own; test_contract.py has the rest."""

from __future__ import annotations

import pytest
import torch

from shardline.weights.formats.plain import Format
from tests.runtime.ops.helpers import KERNELS, assert_same_bits, randn

PLAIN = Format()


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
