"""Token embeddings, vocab-parallel: each rank owns rows of the table, and sends what it has of a step's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardline.runtime.layers.context import LayerContext


class TokenEmbedding:
    """token ids [T] (and positions, where they are learned) -> [T, hidden_size] on every rank."""

    def __init__(self, context: LayerContext, rows: Callable[[Tensor], Tensor] | None) -> None:
        """`rows` looks rows of this rank's part of the table up, where a tied lm_head holds them already."""
        self._group = context.group
        self._lookup = rows or partial(torch.index_select, context.load("embed.weight"), 0)
        spans = context.spans("embed.weight")
        self._start, self._last = spans[context.group.rank].start, spans[context.group.rank].size - 1
        self._stops = torch.tensor([span.stop for span in spans], device=context.device)
        # Gemma rounds the factor itself to the activations' dtype before it multiplies.
        scale = context.spec.embedding_scale
        self._scale = None if scale == 1.0 else torch.tensor(scale, dtype=context.dtype, device=context.device)
        self._positions = context.load("positions.weight") if context.spec.learned_positions else None

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self._rows(token_ids)
        if self._scale is not None:
            hidden = hidden * self._scale
        if self._positions is not None:
            hidden = hidden + self._positions[positions]
        return hidden

    def _rows(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return self._lookup(token_ids)
        # All ranks send a row for every token, so that nobody waits to learn how many of them are whose.
        count = len(token_ids)
        owners = torch.bucketize(token_ids, self._stops, right=True)
        mine = self._lookup((token_ids - self._start).clamp_(0, self._last))
        gathered = self._group.all_gather_rows(mine, [count] * self._group.size)
        return torch.index_select(gathered, 0, owners * count + torch.arange(count, device=token_ids.device))
