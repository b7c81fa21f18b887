from __future__ import annotations

import pytest
import torch

from shardline.runtime.ops.attention.rope import apply_rope, apply_rope_reference, rotary_table
from tests.runtime.ops.helpers import KERNELS, assert_close, assert_same_bits, randn


def table_for(rot: int, max_positions: int = 1000) -> torch.Tensor:
    return rotary_table(10000.0 ** (-torch.arange(0, rot, 2).float() / rot), max_positions, 1.25)


def test_table():
    table = table_for(8)
    assert table.shape == (1000, 8)
    angle = torch.tensor(777.0) * torch.tensor(10000.0) ** (-2 / 8)
    torch.testing.assert_close(table[777, 1], angle.cos() * 1.25)
    torch.testing.assert_close(table[777, 5], angle.sin() * 1.25)


@pytest.mark.parametrize(("head_dim", "rot"), [(64, 64), (128, 128), (80, 32), (6, 6), (96, 72)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
@pytest.mark.usefixtures("isa")
def test_matches_reference(dtype, rng, head_dim, rot, interleaved, position_dtype):
    table = table_for(rot)
    query, key = randn(9, 4, head_dim, dtype=dtype, rng=rng), randn(9, 2, head_dim, dtype=dtype, rng=rng)
    positions = torch.randint(0, 1000, (9,), generator=rng, dtype=position_dtype)
    expected = [apply_rope_reference(x, positions, table, interleaved=interleaved) for x in (query, key)]
    apply_rope(KERNELS, query, key, positions, table, interleaved=interleaved)
    assert_close(query, expected[0], scale=4.0)
    assert_close(key, expected[1], scale=4.0)
    assert_same_bits(query[..., rot:], expected[0][..., rot:])


@pytest.mark.usefixtures("isa", "two_threads")
def test_slices_of_a_fused_projection_and_neighbours(dtype, rng):
    table, positions = table_for(64), torch.arange(40, 340)
    qkv = randn(300, 6 * 64, dtype=dtype, rng=rng)
    query, key = qkv[:, :256].clone().view(300, 4, 64), qkv[:, 256:320].clone().view(300, 1, 64)
    value = qkv[:, 320:].clone()
    apply_rope(KERNELS, query, key, positions, table)
    apply_rope(KERNELS, qkv[:, :256].unflatten(1, (4, 64)), qkv[:, 256:320].unflatten(1, (1, 64)), positions, table)
    assert_same_bits(qkv[:, :256], query.flatten(1))
    assert_same_bits(qkv[:, 256:320], key.flatten(1))
    assert_same_bits(qkv[:, 320:], value)


def test_positions_outside_the_table_are_refused():
    query = torch.ones(1, 1, 8)
    with pytest.raises(ValueError, match="position 1000"):
        apply_rope(KERNELS, query, query, torch.tensor([1000]), table_for(8))
