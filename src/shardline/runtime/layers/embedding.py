"""Token embeddings, vocab-parallel: each rank owns rows of the table and sends the rows that a step needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardline.runtime.layers.context import LayerLoader


class TokenEmbedding:
    """token ids [T] (and positions, if position embeddings are learned) -> [T, hidden_size] on every rank."""

    def __init__(self, loader: LayerLoader, look_up_rows: Callable[[Tensor], Tensor] | None) -> None:
        """`look_up_rows`: returns rows of this rank's part of the table, if a tied lm_head already holds them."""
        stage = loader.stage
        self._group = stage.group
        self._look_up = look_up_rows or partial(torch.index_select, loader.load("embed.weight"), 0)
        spans = stage.spans("embed.weight")
        self._start, self._last = spans[stage.group.rank].start, spans[stage.group.rank].size - 1
        self._stops = torch.tensor([span.stop for span in spans], device=stage.device)
        # Gemma rounds the factor itself to the activations' dtype before it multiplies.
        scale = stage.spec.embedding_scale
        self._scale = None if scale == 1.0 else torch.tensor(scale, dtype=stage.dtype, device=stage.device)
        self._positions = loader.load("positions.weight") if stage.spec.learned_positions else None

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self._rows(token_ids)
        if self._scale is not None:
            hidden = hidden * self._scale
        if self._positions is not None:
            hidden = hidden + self._positions[positions]
        return hidden

    def _rows(self, token_ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return self._look_up(token_ids)
        # Every rank sends a row for every token, so that no rank waits to learn how many tokens the others own.
        count = len(token_ids)
        owners = torch.bucketize(token_ids, self._stops, right=True)
        own_rows = self._look_up((token_ids - self._start).clamp_(0, self._last))
        gathered = self._group.all_gather_rows(own_rows, [count] * self._group.size)
        return torch.index_select(gathered, 0, owners * count + torch.arange(count, device=token_ids.device))
