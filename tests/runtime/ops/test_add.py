from __future__ import annotations

import pytest

from shardline.runtime.ops.add import add
from tests.runtime.ops.helpers import KERNELS, assert_same_bits, randn


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (5, 640)])
def test_adds_as_torch_does(shape, dtype, rng):
    x, y = randn(*shape, dtype=dtype, rng=rng), randn(*shape, dtype=dtype, rng=rng)
    assert_same_bits(add(KERNELS, x, y), x + y)


def test_shapes_must_agree(dtype, rng):
    with pytest.raises(ValueError, match="y has shape"):
        add(KERNELS, randn(2, 3, dtype=dtype, rng=rng), randn(1, 3, dtype=dtype, rng=rng))
