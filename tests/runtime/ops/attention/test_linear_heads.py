"""A linear for every head."""

from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops.attention.linear_heads import linear_heads, linear_heads_reference, pack_heads
from tests.runtime.ops.helpers import KERNELS, assert_close, assert_same_bits, randn


@pytest.mark.parametrize(("heads", "out_features", "in_features"), [(1, 1, 1), (4, 70, 33), (16, 512, 128), (3, 64, 7)])
@pytest.mark.parametrize("num_tokens", [1, 3, 30, 300])
@pytest.mark.usefixtures("isa", "two_threads")
def test_matches_reference(dtype, rng, heads, out_features, in_features, num_tokens):
    weights = randn(heads, out_features, in_features, dtype=dtype, rng=rng)
    x = randn(num_tokens, heads, in_features + 5, dtype=dtype, rng=rng)[..., :in_features]
    assert_close(
        linear_heads(KERNELS, x, pack_heads(KERNELS, weights)),
        linear_heads_reference(x, weights),
        scale=in_features**0.5,
    )


@pytest.mark.usefixtures("isa", "two_threads")
def test_rows_and_heads_do_not_notice_their_neighbours(dtype, rng):
    weights = randn(6, 100, 50, dtype=dtype, rng=rng)
    x = randn(500, 6, 50, dtype=dtype, rng=rng)
    whole = linear_heads(KERNELS, x, pack_heads(KERNELS, weights))
    for num_tokens in (1, 2, 7, 31, 241):
        assert_same_bits(linear_heads(KERNELS, x[:num_tokens], pack_heads(KERNELS, weights)), whole[:num_tokens])
    shard = linear_heads(KERNELS, x[:, 2:5], pack_heads(KERNELS, weights[2:5]))
    assert_same_bits(shard, whole[:, 2:5].contiguous())
    # An absorbed weight is a view: packing must not depend on its strides.
    view = weights.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(pack_heads(KERNELS, view).panels, pack_heads(KERNELS, weights).panels)
