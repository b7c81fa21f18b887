"""Which keys an indexer chooses for each query, see `runtime.ops.attention.chosen_keys`."""

from __future__ import annotations

import torch
from torch import Tensor

_SCORES = 1 << 22
"""Products of queries and keys that are in memory at a time."""


def choose_keys(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    contexts: Tensor,
    slots: Tensor,
    *,
    exact: bool,
) -> None:
    """`exact`: sums have one order, whatever the numbers of rows and keys."""
    block_size, most = keys.shape[1], int(contexts.max()) if len(contexts) else 0
    places = torch.arange(most, device=keys.device)
    each = max(1, _SCORES // max(1, most * query.shape[1]))
    for first in range(0, len(query), each):
        rows = slice(first, first + each)
        tables = block_tables.index_select(0, sequences[rows].long())
        all_slots = tables.index_select(1, places // block_size).long() * block_size + places % block_size
        seen = places < contexts[rows, None]
        held = keys.view(-1, keys.shape[2]).index_select(0, torch.where(seen, all_slots, 0).flatten())
        held = held.view(*all_slots.shape, -1).float()  # [R, most, D]
        scores = _scores(query[rows].float(), weights[rows], held, exact)
        scores = torch.where(seen & ~scores.isnan(), scores, -torch.inf)
        # Places that are not seen come last, and a stable sort puts the earlier of two equal ones first.
        best = scores.sort(dim=1, descending=True, stable=True)[1][:, : slots.shape[1]].sort(dim=1)[0]
        slots[rows] = all_slots.gather(1, best)


def take_tokens(pages: Tensor, slots: Tensor, out: Tensor, word: int) -> None:
    """Pages in the order of tokens; `word` is 1."""
    dim, bits = pages.shape[2], torch.int8 if pages.itemsize == 1 else pages.dtype  # torch cannot index fp8
    out.view(bits).copy_(pages.view(bits).view(-1, dim).index_select(0, slots).view(out.shape))


def _scores(query: Tensor, weights: Tensor, keys: Tensor, exact: bool) -> Tensor:
    """[R, most], for query [R, H, D], weights [R, H] and keys [R, most, D]."""
    if not exact:
        return torch.einsum("rhk,rh->rk", _positive(torch.einsum("rhd,rkd->rhk", query, keys)), weights)
    total = keys.new_zeros(keys.shape[:2])
    for head in range(query.shape[1]):
        product = torch.zeros_like(total)
        for dim in range(query.shape[2]):
            product.addcmul_(query[:, head, dim, None], keys[:, :, dim])
        total.addcmul_(_positive(product), weights[:, head, None])
    return total


def _positive(products: Tensor) -> Tensor:
    """NaN counts as zero, as in the CPU's own kernel."""
    return torch.where(products > 0, products, 0)
