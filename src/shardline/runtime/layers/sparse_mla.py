"""Latent attention to the tokens that an indexer chooses (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

A row that sees no more tokens than are chosen attends to all of them, as without an indexer. For every other row, the
latents of its chosen tokens are gathered to pages of its own, in the order of positions. So one kernel computes both,
and the bits depend on the row alone. Every rank has the whole indexer and makes the same choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.kernels.pages import PANEL_TOKENS
from shardline.kernels.tensors import InputForm, LinearInput, as_tensor
from shardline.models.indexer import Indexer
from shardline.models.mla import MLA
from shardline.models.parts import Norm
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.mla import LatentAttentionLayer
from shardline.runtime.layers.norm import NormLayer
from shardline.runtime.ops.attention.chosen_keys import choose_keys, chosen_pages
from shardline.runtime.ops.attention.latent import mla_attention
from shardline.runtime.ops.attention.rope import RotaryTables
from shardline.runtime.step import Rows
from shardline.weights.formats import plain

_GATHERED_BYTES = 8 << 20
"""Of the latents that are gathered at a time: they should stay in a processor's cache."""
_NORM = Norm("layer", 1e-6, bias=True)
"""Of the keys. Its eps is fixed in the models' own code."""


class TokenChooser:
    """The indexer of a layer: it keeps a key for each token, and chooses the best ones for a query."""

    def __init__(self, loader: LayerLoader, name: str, spec: Indexer, kv_group: int) -> None:
        self._kernels = kernels = loader.stage.kernels
        self._spec, self._kv_group = spec, kv_group
        self._query, self._key, self._weights = (
            plain.Format().pack_linear(kernels, loader.read(f"{name}.indexer_{part}.weight"))
            for part in ("q", "k", "weights")
        )
        loader.on_loaded(self._query.nbytes + self._key.nbytes + self._weights.nbytes)
        self._norm = NormLayer(loader, f"{name}.indexer_norm", _NORM)
        self.keys: Tensor | None = None
        """[num_blocks, block_size, head_dim], once they are allocated."""

    def store(self, x: Tensor, rows: Rows, table: Tensor) -> None:
        """Keep the keys of x [T, hidden]. `table`: see `ops.attention.rope`."""
        assert self.keys is not None
        keys, slots = self._norm(self._key(x)), rows.slots[self._kv_group]
        self._kernels.apply_rope(keys[:, None], rows.positions, table, self._spec.interleaved)
        kept = (slots >= 0).nonzero()[:, 0]
        new = keys.index_select(0, kept).to(self.keys.dtype)
        self.keys.view(-1, keys.shape[1]).index_copy_(0, slots.index_select(0, kept), new)

    def choose(
        self, x: Tensor, latent: Tensor, positions: Tensor, table: Tensor, tables: Tensor, rows: tuple[Tensor, Tensor]
    ) -> Tensor:
        """The slots [R, top_k] that are chosen for x [R, hidden] and its latents of queries. `rows`: their sequences
        in the block tables `tables`, and how many tokens they see."""
        assert self.keys is not None
        spec = self._spec
        query = self._query(latent).view(len(x), spec.num_heads, spec.head_dim)
        self._kernels.apply_rope(query, positions, table, spec.interleaved)
        query = query.to(self.keys.dtype)
        weights = self._weights(x, out_dtype=torch.float32)
        return choose_keys(self._kernels, query, weights, self.keys, tables, *rows, spec.top_k)


class SparseLatentLayer(LatentAttentionLayer):
    """As `LatentAttentionLayer`, for tokens that attend to those that an indexer chooses."""

    def __init__(self, loader: LayerLoader, name: str, spec: MLA, tables: RotaryTables, kv_group: int) -> None:
        super().__init__(loader, name, spec, tables, kv_group)
        assert spec.indexer is not None
        assert self.q_norm is not None, "an indexer reads the latents of queries"
        self._top_k, self._tokens = spec.indexer.top_k, loader.stage.chosen_tokens
        self._chooser = None if spec.indexer.is_shared else TokenChooser(loader, name, spec.indexer, kv_group)
        self._tokens.are_shared |= spec.indexer.is_shared
        self._begins_step = self._tokens.add_layer()
        self._slots: Tensor | None = None
        """Of the rows that attend now."""

    @property
    def query_form(self) -> InputForm:
        """See `LatentAttentionLayer.query_form`: the indexer reads them, too."""
        return "tensor"

    @property
    def input_form(self) -> InputForm:
        """See `LatentAttentionLayer.input_form`."""
        return "tensor"

    def bind_cache(self, *pages: Tensor) -> None:
        """Give the layer its pages."""
        *latents, keys = pages
        if self._chooser is not None:
            self._chooser.keys = keys
        super().bind_cache(*latents)

    def __call__(self, x: LinearInput, rows: Rows, left: Rows) -> Tensor:
        if self._begins_step:
            self._tokens.begin_step()
        x = as_tensor(x)
        down = self.gather_down(self.down(x, rows))
        assert self.q_norm is not None
        latent = as_tensor(self.q_norm(down[:, : self._q_rank])[0])
        q = self.store(self.q(latent, rows), down, rows)
        if self._chooser is not None:
            self._chooser.store(x, rows, self._table)
        if left is not rows:
            q, latent, x = (left.take(part) for part in (q, latent, x))
        self._slots = self._choose(x, latent, left)
        attended = self.attend(q, left)
        self._slots = None
        return self.output(attended, left)

    def _choose(self, x: Tensor, latent: Tensor, rows: Rows) -> Tensor | None:
        """The slots [num_rows, top_k] of the tokens to which rows attend; undefined for those that attend to all. None:
        all rows do."""
        split = self._tokens.split(rows, self._kv_group, self._top_k)
        if split is None:
            return None
        if self._chooser is None:
            return self._tokens.shared(rows)
        self._tokens.forget_choice()
        x, latent, positions = (part.index_select(0, split.chosen) for part in (x, latent, rows.positions))
        tables, of_rows = rows.block_tables[self._kv_group], (split.sequences, split.contexts)
        chosen = self._chooser.choose(x, latent, positions, self._table, tables, of_rows)
        slots = chosen.new_zeros(len(rows), self._top_k).index_copy_(0, split.chosen, chosen)
        self._tokens.keep(rows, slots)
        return slots

    def attend_latents(self, query_latent: Tensor, query_rope: Tensor, rows: Rows) -> Tensor:
        """See `LatentAttentionLayer.attend_latents`."""
        split, cache, slots = self._tokens.split(rows, self._kv_group, self._top_k), self._cache, self._slots
        if split is None:
            return super().attend_latents(query_latent, query_rope, rows)
        assert cache is not None
        assert slots is not None
        kernels, scale, out = self._kernels, self._spec.score.scale, torch.empty_like(query_latent)
        if len(split.whole):
            latent, rope = (part.index_select(0, split.whole) for part in (query_latent, query_rope))
            out.index_copy_(0, split.whole, mla_attention(kernels, latent, rope, cache, *split.tables, scale))
        # A row of its own is a sequence of its own.
        blocks = -(-self._top_k // PANEL_TOKENS)
        row_bytes = blocks * PANEL_TOKENS * self._linears.latent_dim * query_latent.itemsize
        for some in torch.split(split.chosen, max(1, _GATHERED_BYTES // row_bytes)):
            pages = chosen_pages(kernels, cache, slots.index_select(0, some), kernels.page_order(query_latent.dtype))
            starts = torch.arange(len(some) + 1, dtype=torch.int32, device=some.device)
            tables = torch.arange(len(some) * blocks, dtype=torch.int32, device=some.device).view(-1, blocks)
            lens = torch.full_like(starts[1:], self._top_k)
            latent, rope = (part.index_select(0, some) for part in (query_latent, query_rope))
            out.index_copy_(0, some, mla_attention(kernels, latent, rope, pages, tables, starts, lens, scale))
        return out
