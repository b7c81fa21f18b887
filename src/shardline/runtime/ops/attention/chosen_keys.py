"""Which keys an indexer chooses for each query, and the pages in which the chosen latents lie one after another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.kernels.pages import PANEL_TOKENS, PageOrder
from shardline.kernels.tensors import LatentCache, QuantizedLatents


def choose_keys(
    kernels: Kernels,
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    contexts: Tensor,
    top_k: int,
) -> Tensor:
    """[R, top_k] int64: the slots, block * block_size + offset, of the keys with the highest scores, in the order of
    their positions.

    The score of a key is the sum over heads of weights [R, H] (float32) times max(0, query [R, H, D] . key), in float32
    and in an order that depends on nothing else. keys [num_blocks, block_size, D] have the order of tokens. Row r sees
    the first contexts[r] keys, top_k or more, of the sequence sequences[r] of the block table (all int32). Of two keys
    with one score, the earlier one is chosen.
    """
    slots = query.new_empty(len(query), top_k, dtype=torch.int64)
    kernels.choose_keys(query, weights, keys, block_tables, sequences, contexts, slots)
    return slots


def choose_keys_reference(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    contexts: Tensor,
    top_k: int,
) -> tuple[Tensor, list[Tensor]]:
    """`choose_keys` in fp64, and all scores of each row."""
    block_size, rows, scores = keys.shape[1], [], []
    for row, (sequence, context) in enumerate(zip(sequences.tolist(), contexts.tolist(), strict=True)):
        places = torch.arange(context)
        slots = block_tables[sequence, places // block_size].long() * block_size + places % block_size
        products = keys.view(-1, keys.shape[2])[slots].double() @ query[row].double().T
        scores.append((products.clamp(min=0) * weights[row].double()).sum(1))
        best = scores[-1].sort(descending=True, stable=True)[1][:top_k].sort()[0]
        rows.append(slots[best])
    return torch.stack(rows), scores


def chosen_pages(kernels: Kernels, cache: LatentCache, slots: Tensor, order: PageOrder) -> LatentCache:
    """The latents of slots [R, K] as a cache of blocks of 16 tokens, those of a row in consecutive blocks; the last
    token of a row fills its last block. `order` is that of the pages, before and after."""
    flat = F.pad(slots, (0, -slots.shape[1] % PANEL_TOKENS), mode="replicate").flatten()

    def take(pages: Tensor) -> Tensor:
        out = pages.new_empty(len(flat) // PANEL_TOKENS, PANEL_TOKENS, pages.shape[2])
        kernels.take_tokens(pages, flat, out, 2 if order == "pairs" else 1)
        return out

    if isinstance(cache, Tensor):
        return take(cache)
    scales = cache.scales.view(-1).index_select(0, flat).view(-1, PANEL_TOKENS)
    return QuantizedLatents(take(cache.values), take(cache.rope_keys), scales)
