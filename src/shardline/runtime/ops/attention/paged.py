"""Causal attention over a paged KV cache, one op for prefill, chunked prefill and decode."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels


def paged_attention(
    kernels: Kernels,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """[T, Hq, Dv], for query [T, Hq, D] against caches [num_blocks, Hk, block_size, D or Dv], whose pages have the
    order of `kernels.page_order` (see `pages`).

    Sequence s owns query tokens query_starts[s] : query_starts[s + 1]; context_lens[s] counts its keys, the new ones
    included, so its i-th query has position context_lens[s] - query_len + i. A query sees the keys up to its own
    position, or only the last `window` of them, or, if attention is `chunked`, those in its own chunk of `window`
    positions. Position p is in block block_tables[s, p // block_size]; entries for blocks that no query of this call
    sees are never read. Scores are scaled, then capped: softcap * tanh(score / softcap). Every query also sees a key
    without a value, whose score is in `sinks` [Hq] float32.

    Keys are cut into splits of 512 that are anchored at absolute position. Splits are merged in index order in fp32,
    and the result is rounded once. Where the ISA multiplies pairs of bf16, the weights exp(score - maximum of the
    split) are first rounded to bf16. The rounded weights are summed, so that they still add up to one. The scale is
    positive. Index tensors are int32; the token stride of query is free. With key_scales and value_scales, fp32
    [num_blocks, Hk, block_size], the caches are int8 or float8_e4m3fn, filled by `write_kv`.
    """
    out = kernels.activation_empty(query.dtype, query.shape[0], query.shape[1], value_cache.shape[3])
    kernels.paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        context_lens,
        out,
        scale,
        window,
        softcap,
        key_scales,
        value_scales,
        sinks,
        chunked,
    )
    return out


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """`paged_attention` in fp64, with the whole score matrix, for pages in the order of tokens."""
    num_heads, num_kv_heads, block_size = query.shape[1], key_cache.shape[1], key_cache.shape[2]
    out = torch.empty(query.shape[0], num_heads, value_cache.shape[3], dtype=query.dtype)
    if key_scales is not None and value_scales is not None:
        key_cache = key_cache.float() * key_scales[..., None]
        value_cache = value_cache.float() * value_scales[..., None]
    starts = query_starts.tolist()
    for s, context_len in enumerate(context_lens.tolist()):
        positions = torch.arange(context_len - (starts[s + 1] - starts[s]), context_len)
        if len(positions) == 0:
            continue
        first = 0 if window is None else max(0, int(positions[0]) - window + 1)
        keys = torch.arange(first, context_len)
        blocks = block_tables[s, keys // block_size].long()
        # [num_heads, num_keys, dim]
        k, v = (
            cache[blocks, :, keys % block_size].double().transpose(0, 1).repeat_interleave(num_heads // num_kv_heads, 0)
            for cache in (key_cache, value_cache)
        )
        q = query[starts[s] : starts[s + 1]].double().transpose(0, 1)
        scores = q @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = keys[None, :] > positions[:, None]
        if window is not None:
            first_seen = positions // window * window if chunked else positions - window + 1
            hidden |= keys[None, :] < first_seen[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, len(positions), 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        out[starts[s] : starts[s + 1]] = (weights @ v).transpose(0, 1).to(query.dtype)
    return out
