"""Token embeddings, vocab-parallel: each rank owns rows of the table and sends the rows that a step needs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardline.runtime.layers.context import LayerContext


class TokenEmbedding:
    """token ids [T] (and positions, where they are learned) -> [T, hidden_size] on every rank."""

    def __init__(self, context: LayerContext, rows: Callable[[Tensor], Tensor] | None) -> None:
        """`rows` looks rows of this rank's part of the table up, where a tied lm_head holds them already."""
        self._group = context.group
        self._lookup = rows or context.load("embed.weight").__getitem__
        spans = context.spans("embed.weight")
        self._start = spans[context.group.rank].start
        self._num_rows = spans[context.group.rank].size
        self._on_host = context.device.type == "cpu"
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
        owners = torch.bucketize(token_ids, self._stops, right=True)
        if not self._on_host:
            return self._any_rows(token_ids, owners)
        local = self._lookup(token_ids[owners == self._group.rank] - self._start)
        counts = torch.bincount(owners, minlength=self._group.size).tolist()
        gathered = self._group.all_gather_rows(local, counts)
        hidden = torch.empty_like(gathered)
        hidden[torch.argsort(owners, stable=True)] = gathered
        return hidden

    def _any_rows(self, token_ids: Tensor, owners: Tensor) -> Tensor:
        """Each rank sends a row for every token, its own or another: a device would have to tell the host how many of
        them are its own."""
        start, stop = self._start, self._start + self._num_rows
        local = self._lookup(token_ids.clamp(start, stop - 1) - start)
        size, width = self._group.size, local.shape[1]
        gathered = self._group.all_gather_columns(local, [width] * size).view(-1, size, width)
        return gathered.gather(1, owners[:, None, None].expand(-1, 1, width))[:, 0]
