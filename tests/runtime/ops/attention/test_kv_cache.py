from __future__ import annotations

import pytest
import torch

from shardline.kernels.pages import tokens_of
from shardline.runtime.ops.attention.kv_cache import write_kv_reference
from shardline.runtime.ops.attention.rope import apply_rope, rotary_table
from tests.runtime.ops.helpers import KERNELS, assert_same_bits, randn

BLOCK_SIZE = 16
MAX_POSITIONS = 500


class Call:
    """Heads of a fused projection and where they go; slots in any order, one of them negative."""

    def __init__(self, num_tokens: int, dim: int, rot: int, dtype: torch.dtype, rng: torch.Generator) -> None:
        self.heads = randn(num_tokens, 9, dim, dtype=dtype, rng=rng)
        self.positions = torch.randint(0, MAX_POSITIONS, (num_tokens,), generator=rng)
        self.table = rotary_table(torch.rand(rot // 2, generator=rng), MAX_POSITIONS)
        self.num_blocks = -(-num_tokens // BLOCK_SIZE) + 1
        self.slots = torch.randperm(self.num_blocks * BLOCK_SIZE, generator=rng)[:num_tokens]
        self.slots[num_tokens // 2] = -1

    def run(self, one_after_the_other: bool, interleaved: bool, as_bytes: bool) -> tuple[torch.Tensor, ...]:
        """(heads after it, key cache, value cache, their scales)"""
        heads = self.heads.clone()
        query, key, value = heads.split([5, 2, 2], dim=1)
        cache_dtype = torch.int8 if as_bytes else heads.dtype
        caches = [torch.zeros(self.num_blocks, 2, BLOCK_SIZE, heads.shape[2], dtype=cache_dtype) for _ in range(2)]
        scales = [torch.zeros(self.num_blocks, 2, BLOCK_SIZE) for _ in range(2)]
        own_scales = scales if as_bytes else (None, None)
        if one_after_the_other:
            apply_rope(KERNELS, query, key, self.positions, self.table, interleaved=interleaved)
            KERNELS.write_kv(key, value, caches[0], caches[1], self.slots, *own_scales)
        else:
            where = (caches[0], caches[1], self.positions, self.slots, self.table)
            KERNELS.rope_and_write_kv(query, key, value, *where, interleaved, *own_scales)
        return heads, *caches, *scales


def assert_one_is_the_other(call: Call, interleaved: bool, as_bytes: bool) -> None:
    both = [call.run(separate, interleaved, as_bytes) for separate in (False, True)]
    for actual, expected in zip(*both, strict=True):
        if actual.dtype == torch.int8:
            assert torch.equal(actual, expected)
        else:
            assert_same_bits(actual, expected)


@pytest.mark.parametrize(("dim", "rot"), [(64, 64), (80, 32), (20, 6), (6, 6), (2, 2)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.usefixtures("isa")
def test_rotating_and_writing_is_one_after_the_other(dtype, rng, dim, rot, interleaved, as_bytes):
    for num_tokens in (1, 2, 17):
        assert_one_is_the_other(Call(num_tokens, dim, rot, dtype, rng), interleaved, as_bytes)


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.usefixtures("isa", "two_threads")
def test_so_it_is_for_every_number_of_tokens(dtype, rng, as_bytes):
    """Few of them, about the numbers from which threads share the work, and many."""
    for num_tokens in (*range(1, 34), *range(51, 57), *range(118, 124), 257):
        assert_one_is_the_other(Call(num_tokens, 34, 18, dtype, rng), False, as_bytes)


@pytest.mark.usefixtures("isa")
def test_keys_and_values_lie_where_the_reference_puts_them(dtype, rng):
    call = Call(50, 34, 18, dtype, rng)
    heads, *caches = call.run(False, interleaved=True, as_bytes=False)[:3]
    expected = [torch.zeros_like(cache) for cache in caches]
    write_kv_reference(heads[:, 5:7], heads[:, 7:], expected[0], expected[1], call.slots)
    order = KERNELS.page_order(dtype)
    assert_same_bits(tokens_of(caches[0], "keys", order), expected[0])
    assert_same_bits(tokens_of(caches[1], "values", order), expected[1])


def test_pages_without_an_order_are_refused():
    key, cache, slots = torch.zeros(1, 1, 8), torch.zeros(4, 1, 24, 8), torch.tensor([0])
    with pytest.raises(ValueError, match="a block of 24 tokens: the block size must be a multiple of 16"):
        KERNELS.write_kv(key, key, cache, cache, slots, None, None)
    if KERNELS.page_order(torch.bfloat16) == "pairs":
        key, cache = key[..., :7].bfloat16(), torch.zeros(4, 1, BLOCK_SIZE, 7, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="keys of 7 elements: in bf16 their number must be even"):
            KERNELS.write_kv(key, key, cache, cache, slots, None, None)


def test_what_lies_outside_is_refused():
    heads, cache, table = torch.zeros(1, 1, 8), torch.zeros(4, 1, BLOCK_SIZE, 8), rotary_table(torch.ones(4), 10)

    def call(slot: int, position: int, table: torch.Tensor = table) -> None:
        where = (torch.tensor([position]), torch.tensor([slot]), table)
        KERNELS.rope_and_write_kv(heads, heads, heads, cache, cache, *where, False, None, None)

    call(63, 9)
    with pytest.raises(ValueError, match="a slot lies outside"):
        call(64, 9)
    with pytest.raises(ValueError, match="position 10 is outside"):
        call(63, 10)
    with pytest.raises(ValueError, match="the table's width"):
        call(63, 9, rotary_table(torch.ones(5), 10))
