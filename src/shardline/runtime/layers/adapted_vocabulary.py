"""The adapters (LoRA) of the token embedding and of the lm_head: low-rank changes, or whole weights in their place.

A model may tie both weights; adapters change each separately, as PEFT does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from shardline.kernels.tensors import InputForm, LinearInput, as_tensor
from shardline.models.adapters import EMBEDDING, LM_HEAD
from shardline.models.parameters import kind_of
from shardline.models.partition import Span
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.low_rank import LinearAdapters, dora_factors
from shardline.runtime.layers.vocabulary import LMHead, TokenEmbedding
from shardline.runtime.ops.adapters.low_rank import LowRankKernels, add_low_rank
from shardline.runtime.step import Rows
from shardline.weights.base import PackedLinear
from shardline.weights.formats import plain

_COLUMNS = 256
"""Columns of a table whose norms are found at once."""


class EmbeddingAdapters:
    """Low-rank changes add scale * up down[:, id] to the row of a token. They are whole on every rank; of whole tables,
    each has its own range."""

    def __init__(self, loader: LayerLoader, own: Span) -> None:
        """`own`: the part of the vocabulary whose rows this rank owns."""
        stage, spec = loader.stage, loader.stage.spec
        num_slots, max_rank = stage.adapters.num_slots, stage.adapters.max_rank
        self.names: tuple[str, ...] = (EMBEDDING.removesuffix(".weight"),)
        self.spans: tuple[Span, ...] = (Span(0, spec.hidden_size),)
        self.own_whole = own
        self._loader = loader
        self._kernels = cast(LowRankKernels, stage.kernels)
        self._dtype, self._device = stage.dtype, stage.device
        self._inner = torch.empty(num_slots, spec.vocab_size, max_rank, dtype=stage.dtype, device=stage.device)
        """The columns of `down`; memory that no adapter needs is not touched."""
        self._outer = self._kernels.low_rank_empty(num_slots, max_rank, max_rank, (spec.hidden_size,), stage.dtype)
        self._changes = [False] * num_slots
        """Whether each slot has a low-rank change. Other slots are loaded while steps run."""
        self._wholes: list[Tensor | None] = [None] * num_slots
        loader.adapted.append(self)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self._changes[slot], self._wholes[slot] = False, None
        self._outer.clear(slot)
        self._loader.scaling_slots.discard(slot)

    def put(self, slot: int, part: int, down: Tensor, up: Tensor, scale: float, magnitude: Tensor | None) -> None:
        """Give a slot its change: down [rank, vocab], up [hidden, rank]; `magnitude` [hidden]: the norms of the columns
        of the changed table.

        Raises:
            ValueError: a column is zero, so no factor gives it a norm.
        """
        rank, inner = len(down), self._inner[slot]
        factors = None if magnitude is None else self._factors(slot, down, up, scale, magnitude)
        inner[:, :rank] = down.T
        inner[:, rank:] = 0
        self._outer.put(slot, part, torch.eye(rank, inner.shape[1]), up, scale, factors)
        self._changes[slot] = True

    def _factors(self, slot: int, down: Tensor, up: Tensor, scale: float, magnitude: Tensor) -> Tensor:
        """The factors of columns [hidden]. Norms are those of whole columns, so each rank reads the whole table."""
        name, found = self.names[0], []
        for first in range(0, len(up), _COLUMNS):
            own = slice(first, min(first + _COLUMNS, len(up)))
            base = self._loader.original_rows(name, (None, Span(own.start, own.stop))).T.contiguous()
            found.append(dora_factors(self._loader, slot, name, base, down, up[own], scale, magnitude[own]))
        return torch.cat(found)

    def put_whole(self, slot: int, rows: Tensor) -> None:
        """Give a slot its own table: the rows [own range, hidden]."""
        self._wholes[slot] = rows.to(self._device, self._dtype, copy=True)

    def look_up(self, base: Callable[[Tensor], Tensor], adapters: Tensor, own_ids: Tensor) -> Tensor:
        """Rows of this rank's range by their indices in it, each from the table of its adapter."""
        rows = base(own_ids)
        for slot in set(adapters.tolist()):
            if slot >= 0 and (whole := self._wholes[slot]) is not None:
                places = (adapters == slot).nonzero()[:, 0]
                rows[places] = whole[own_ids[places]]
        return rows

    def add(self, rows: Tensor, token_ids: Tensor, adapters: Tensor, *, scaled: bool) -> Tensor:
        """Rows [T, hidden] of tokens with what their adapters add, rounded once. `scaled`: see `Rows`."""
        if not any(self._changes[slot] for slot in adapters.tolist() if slot >= 0):
            return rows
        vocab_size, max_rank = self._inner.shape[1:]
        places = adapters.long().clamp(min=0) * vocab_size + token_ids
        inner = torch.index_select(self._inner.view(-1, max_rank), 0, places)
        return add_low_rank(self._kernels, rows, inner, adapters, self._outer, scaled=scaled)


class HeadAdapters(LinearAdapters):
    """The adapters of an lm_head, for the columns that this rank owns."""

    def __init__(self, loader: LayerLoader, own: Span) -> None:
        """`own`: the part of the vocabulary whose logits this rank computes."""
        super().__init__(loader, [LM_HEAD.removesuffix(".weight")], [own], loader.stage.spec.hidden_size)
        num_slots = loader.stage.adapters.num_slots
        self.changes = [False] * num_slots
        """Whether each slot changes the lm_head. Other slots are loaded while steps run."""
        self.wholes: list[PackedLinear | None] = [None] * num_slots
        """What stands in place of the base weight. Steps with such rows are not replayed."""
        self._plain_kernels, self._dtype = loader.stage.kernels, loader.stage.dtype

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.changes[slot], self.wholes[slot] = False, None

    def put(self, slot: int, part: int, down: Tensor, up: Tensor, scale: float, magnitude: Tensor | None) -> None:
        super().put(slot, part, down, up, scale, magnitude)
        self.changes[slot] = True

    def put_whole(self, slot: int, rows: Tensor) -> None:
        """Give a slot its own weight: the rows [own range, hidden]."""
        self.wholes[slot] = plain.Format().pack_lm_head(self._plain_kernels, rows.to(self._dtype))
        self.changes[slot] = True

    def put_whole_products(self, logits: Tensor, hidden: LinearInput, adapters: Tensor, bias: Tensor | None) -> None:
        """Write the logits [R, own range] of rows whose adapters have a weight of their own."""
        for slot in set(adapters.tolist()):
            if slot >= 0 and (whole := self.wholes[slot]) is not None:
                places = (adapters == slot).nonzero()[:, 0]
                logits[places] = whole(as_tensor(hidden)[places], bias, out_dtype=torch.float32)


class AdaptedEmbedding(TokenEmbedding):
    """A `TokenEmbedding` whose rows adapters change."""

    def __init__(self, loader: LayerLoader, look_up_rows: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__(loader, look_up_rows)
        stage = loader.stage
        self._adapters = EmbeddingAdapters(loader, stage.spans(EMBEDDING)[stage.group.rank])

    def _rows(self, token_ids: Tensor, table: Rows) -> Tensor:
        adapters, changes = table.adapters, self._adapters
        if adapters is None:
            return super()._rows(token_ids, table)
        rows = self._gather(token_ids, partial(changes.look_up, self._look_up, adapters))
        return changes.add(rows, token_ids, adapters, scaled=table.scaled)


class AdaptedLMHead(LMHead):
    """An `LMHead` whose logits adapters change."""

    def __init__(self, loader: LayerLoader) -> None:
        super().__init__(loader)
        self.adapters = HeadAdapters(loader, self.spans[loader.stage.group.rank])

    @property
    def input_form(self) -> InputForm:
        return "tensor"

    def __call__(self, hidden: LinearInput, table: Rows, chosen: Tensor | None = None) -> Tensor:
        if table.adapters is None:
            return super().__call__(hidden, table, chosen)
        adapters = table.adapters if chosen is None else table.adapters[chosen]
        bias = self.adapters.bias(self._bias, hidden, table, chosen)
        logits = self._packed(hidden, bias, out_dtype=torch.float32)
        self.adapters.put_whole_products(logits, hidden, adapters, self._bias)
        return self._finish(logits)


def make_embedding(loader: LayerLoader, look_up_rows: Callable[[Tensor], Tensor] | None) -> TokenEmbedding:
    """The embedding of a stage, see `TokenEmbedding`."""
    return (AdaptedEmbedding if kind_of(EMBEDDING) in loader.stage.adapters.kinds else TokenEmbedding)(
        loader, look_up_rows
    )


def make_lm_head(loader: LayerLoader) -> LMHead:
    """The lm_head of a stage."""
    return (AdaptedLMHead if kind_of(LM_HEAD) in loader.stage.adapters.kinds else LMHead)(loader)
