"""Attention in parts of some splits each, merged: the bits of the attention that one rank computes at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardline import _cpu
from shardline.kernels.contract import Kernels
from shardline.kernels.tensors import LatentCache
from shardline.runtime.ops.attention.latent import mla_attention_reference
from shardline.runtime.ops.attention.paged import paged_attention_reference
from shardline.runtime.ops.attention.partials import Partials, merge_partials_reference
from tests.runtime.ops.attention import test_latent
from tests.runtime.ops.attention.test_paged import E4M3, attend, random_sequence
from tests.runtime.ops.helpers import KERNELS, assert_close, assert_same_bits

LENGTHS = [(0, 1), (511, 512), (510, 514), (0, 70), (1020, 1030), (1535, 1536), (1530, 1537), (2049, 2050)]
"""Begin and end of the new tokens of each sequence, around the bounds of splits."""


def attention_partials(
    kernels: Kernels,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    num_splits: int,
    first_split: int = 0,
    split_step: int = 1,
    window: int | None = None,
    softcap: float | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    chunked: bool = False,
) -> Partials:
    shape = num_splits, query.shape[0], query.shape[1]
    maxima, sums = (kernels.activation_empty(torch.float32, *shape) for _ in range(2))
    outputs = kernels.activation_empty(torch.float32, *shape, value_cache.shape[3])
    kernels.attention_partials(
        query,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        context_lens,
        maxima,
        sums,
        outputs,
        scale,
        window,
        softcap,
        key_scales,
        value_scales,
        chunked,
        first_split,
        split_step,
    )
    return Partials(maxima, sums, outputs)


def merge_partials(kernels: Kernels, ranks: Partials, dtype: torch.dtype, sinks: Tensor | None = None) -> Tensor:
    out = kernels.activation_empty(dtype, *ranks.outputs.shape[2:])
    kernels.merge_partials(*ranks, out, sinks)
    return out


def on_ranks(
    kernels: Kernels,
    num_ranks: int,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    sinks: Tensor | None,
    **options,
) -> Partials:
    """The partials of all ranks, as they lie after a gather. A rank's table names only the blocks of its own splits."""
    num_splits = -(-int(context_lens.max()) // 512)
    split_of_block = torch.arange(block_tables.shape[1]) * key_cache.shape[2] // 512
    ranks = []
    for rank in range(num_ranks):
        ranks.append(
            attention_partials(
                kernels,
                query,
                key_cache,
                value_cache,
                torch.where(split_of_block % num_ranks == rank, block_tables, 0),
                query_starts,
                context_lens,
                scale,
                num_splits=-(-num_splits // num_ranks),
                first_split=rank,
                split_step=num_ranks,
                **options,
            )
        )
    return Partials(*(torch.stack(parts) for parts in zip(*ranks, strict=True)))


def merged(kernels: Kernels, num_ranks: int, query: Tensor, *tensors: Any, sinks=None, **options) -> Tensor:
    parts = on_ranks(kernels, num_ranks, query, *tensors, sinks=sinks, **options)
    return merge_partials(kernels, parts, query.dtype, sinks)


CASES = [
    {},
    {"window": 20},
    {"window": 700, "softcap": 30.0},
    {"window": 300, "chunked": True},
    {"softcap": 5.0, "sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
]


def batch(rng: torch.Generator, dtype: torch.dtype, dim: int) -> list:
    return [(random_sequence(rng, end, dtype, heads=4, kv_heads=2, dim=dim), begin, end) for begin, end in LENGTHS]


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_merged_parts_are_the_attention_of_one_rank(isa, dtype, rng, num_ranks, options):
    sequences = batch(rng, dtype, 64)
    whole = attend(sequences, shuffle=1, **options)
    for ours, expected in zip(
        attend(sequences, shuffle=1, op=partial(merged, KERNELS, num_ranks), **options), whole, strict=True
    ):
        assert_same_bits(ours, expected)


@pytest.mark.parametrize(("stored", "dim"), [(torch.int8, 64), (E4M3, 64), (None, 36), (None, 6)], ids=str)
def test_merged_parts_of_other_caches(isa, dtype, rng, stored, dim):
    sequences = batch(rng, dtype, dim)
    whole = attend(sequences, stored=stored, window=700)
    for ours, expected in zip(
        attend(sequences, stored=stored, window=700, op=partial(merged, KERNELS, 2)), whole, strict=True
    ):
        assert_same_bits(ours, expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_merged_parts_do_not_depend_on_threads(rng, threads):
    sequences = batch(rng, torch.float32, 64)
    whole = attend(sequences)
    _cpu.set_num_threads(threads)
    try:
        parts = attend(sequences, op=partial(merged, KERNELS, 2))
    finally:
        _cpu.set_num_threads(1)
    for ours, expected in zip(parts, whole, strict=True):
        assert_same_bits(ours, expected)


@pytest.mark.parametrize("options", CASES, ids=str)
def test_parts_match_their_reference(rng, options):
    """The maxima and sums are those of the scores: merged in fp64, they give the reference's attention."""

    def merged_in_fp64(kernels: Kernels, query: Tensor, *tensors: Any, sinks=None, **options) -> Tensor:
        parts = on_ranks(kernels, 2, query, *tensors, sinks=sinks, **options)
        unseen = parts.sums == 0
        assert bool((parts.maxima[unseen] == -torch.inf).all())
        assert not parts.outputs[unseen].any()
        return merge_partials_reference(parts, query.dtype, sinks)

    sequences = batch(rng, torch.float32, 64)
    expected = attend(sequences, poison=False, op=paged_attention_reference, **options)
    for ours, theirs in zip(attend(sequences, op=partial(merged_in_fp64, KERNELS), **options), expected, strict=True):
        assert_close(ours, theirs, scale=2.0)


def latents_on_ranks(
    kernels: Kernels,
    num_ranks: int,
    query_latent: Tensor,
    query_rope: Tensor,
    cache: LatentCache,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Partials:
    """As `on_ranks`, over latents."""
    num_splits = -(-int(context_lens.max()) // 512)
    pages = cache if isinstance(cache, Tensor) else cache.values
    split_of_block = torch.arange(block_tables.shape[1]) * pages.shape[1] // 512
    ranks = []
    for rank in range(num_ranks):
        shape = -(-num_splits // num_ranks), *query_latent.shape[:2]
        parts = Partials(torch.empty(shape), torch.empty(shape), torch.empty(*shape, query_latent.shape[2]))
        own_tables = torch.where(split_of_block % num_ranks == rank, block_tables, 0)
        tables = own_tables, query_starts, context_lens
        kernels.mla_partials(query_latent, query_rope, cache, *tables, *parts, scale, rank, num_ranks)
        ranks.append(parts)
    return Partials(*(torch.stack(parts) for parts in zip(*ranks, strict=True)))


def merged_latents(kernels: Kernels, num_ranks: int, query_latent: Tensor, *tensors: Any) -> Tensor:
    return merge_partials(kernels, latents_on_ranks(kernels, num_ranks, query_latent, *tensors), query_latent.dtype)


@pytest.mark.parametrize("stored", [None, torch.int8, E4M3], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_merged_parts_of_latents_are_the_attention_of_one_rank(isa, dtype, rng, num_ranks, stored):
    sequences = [(test_latent.random_sequence(rng, end, dtype), begin, end) for begin, end in LENGTHS]

    def in_parts(kernels: Kernels, *tensors: Any) -> Tensor:
        return merged_latents(kernels, num_ranks, *tensors)

    attend_latents = partial(test_latent.attend, sequences, stored=stored, shuffle=1)
    with pytest.MonkeyPatch.context() as patch:
        whole = attend_latents()
        patch.setattr(test_latent, "host_attention", parts := partial(in_parts, KERNELS))
        for ours, expected in zip(attend_latents(op=parts), whole, strict=True):
            assert_same_bits(ours, expected)


def test_parts_of_latents_match_their_reference(rng):
    def merged_in_fp64(query_latent: Tensor, *tensors: Any) -> Tensor:
        parts = latents_on_ranks(KERNELS, 2, query_latent, *tensors)
        unseen = parts.sums == 0
        assert bool((parts.maxima[unseen] == -torch.inf).all())
        assert not parts.outputs[unseen].any()
        return merge_partials_reference(parts, query_latent.dtype)

    sequences = [(test_latent.random_sequence(rng, end, torch.float32), begin, end) for begin, end in LENGTHS]
    expected = test_latent.attend(sequences, poison=False, op=mla_attention_reference)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_latent, "host_attention", merged_in_fp64)
        for ours, theirs in zip(test_latent.attend(sequences, op=merged_in_fp64), expected, strict=True):
            assert_close(ours, theirs, scale=2.0)


def test_what_does_not_fit_is_refused(rng):
    parts = Partials(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 3, 8))
    with pytest.raises(ValueError, match="maxima"):
        merge_partials(KERNELS, parts, torch.float32)
    query = torch.zeros(1, 2, 8)
    cache, table = torch.zeros(1, 2, 16, 8), torch.zeros(1, 1, dtype=torch.int32)
    index = (table, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ValueError, match="splits"):
        attention_partials(KERNELS, query, cache, cache, *index, 1.0, num_splits=1, split_step=0)
