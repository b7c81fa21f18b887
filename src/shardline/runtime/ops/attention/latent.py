"""Causal attention over a paged cache of latents (MLA, absorbed), one op for prefill, chunked prefill and decode."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.kernels.tensors import LatentCache, QuantizedLatents


def mla_attention(
    kernels: Kernels,
    query_latent: Tensor,
    query_rope: Tensor,
    cache: LatentCache,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """[T, H, R], for query_latent [T, H, R] and query_rope [T, H, P] against a cache [num_blocks, block_size, R + P],
    whose pages have the order of `kernels.page_order`.

    All heads share one row of the cache per token: it is their key, and its first R elements are their value. Block
    tables, query_starts and context_lens are as in `paged.paged_attention`. Token strides, and the head stride of
    query_rope, are free.

    Keys are cut into splits of 512 that are anchored at absolute position. Splits are merged in index order in fp32,
    and the result is rounded once. Where the ISA multiplies pairs of bf16, a split's weights exp(score - max) are
    rounded to bf16, and the rounded weights are summed. The scale is positive. For `QuantizedLatents`, scores and
    weights are multiplied by the scales; the values stay as they are.
    """
    out = kernels.activation_empty(query_latent.dtype, *query_latent.shape)
    kernels.mla_attention(query_latent, query_rope, cache, block_tables, query_starts, context_lens, out, scale)
    return out


def mla_attention_reference(
    query_latent: Tensor,
    query_rope: Tensor,
    cache: LatentCache,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """`mla_attention` in fp64, with the whole score matrix and only the last rounding, for pages in the order of
    tokens."""
    cache = cache.dequantized() if isinstance(cache, QuantizedLatents) else cache
    block_size, latent_dim = cache.shape[1], query_latent.shape[2]
    out = torch.empty(query_latent.shape, dtype=query_latent.dtype)
    starts = query_starts.tolist()
    for s, context_len in enumerate(context_lens.tolist()):
        tokens = slice(starts[s], starts[s + 1])
        positions = torch.arange(context_len - (starts[s + 1] - starts[s]), context_len)
        keys = torch.arange(context_len)
        rows = cache[block_tables[s, keys // block_size].long(), keys % block_size].double()
        query = torch.cat([query_latent[tokens], query_rope[tokens]], -1).double()
        scores = torch.einsum("thd,kd->htk", query, rows) * scale
        weights = scores.masked_fill(keys[None, :] > positions[:, None], -torch.inf).softmax(-1)
        out[tokens] = torch.einsum("htk,kd->thd", weights, rows[:, :latent_dim]).to(out.dtype)
    return out
