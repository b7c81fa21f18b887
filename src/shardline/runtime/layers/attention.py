"""Attention over the paged KV cache; heads are split over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.kernels.tensors import InputForm, LinearInput
from shardline.models.attention import GQA
from shardline.models.parts import KVDType, KVPart
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.heads_norm import AllHeadsNorm
from shardline.runtime.layers.linear import ClosingLinear, ColumnLinear
from shardline.runtime.layers.norm import NormLayer
from shardline.runtime.ops.activation import gate_heads
from shardline.runtime.ops.attention.paged import paged_attention
from shardline.runtime.ops.attention.rope import RotaryTables, apply_rope, query_factors
from shardline.runtime.ops.norm import rms_norm
from shardline.runtime.ops.scale import scale_rows
from shardline.runtime.step import Rows


class KVPages(NamedTuple):
    """The pages of one layer; layers of different KV groups may share them."""

    keys: Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim], in the order of `Kernels.page_order`; the values have the same
    shape."""
    values: Tensor
    key_scales: Tensor | None = None
    """float32 [num_blocks, num_kv_heads, block_size] if keys and values are int8 or fp8 (e4m3), else None."""
    value_scales: Tensor | None = None


class AttentionLayer:
    """x [T, hidden] -> [Q, hidden]: project, normalise, rotate, store KV; then the Q rows that are left attend and are
    projected back."""

    def __init__(self, loader: LayerLoader, name: str, spec: GQA, tables: RotaryTables, kv_group: int) -> None:
        self.spec = spec
        self.kv_group = kv_group
        self._kernels = loader.stage.kernels
        self._reads_only, self._reads_token = spec.kv_source is not None, spec.projections.reads_token
        self._head_dim, self._window = spec.head_dim, spec.window
        self._has_gate = spec.projections.output_gate
        parts = ["q", "k"] if spec.projections.value_is_key else ["q", "k", "v"]
        self.parts = ["q"] if self._reads_only else parts
        self.qkv = ColumnLinear(loader, [f"{name}.{part}" for part in self.parts], spec.projections.qkv_bias)
        self.num_heads = self.count_heads(self.qkv.widths)
        """Number of local heads of queries, keys and values."""
        of_head = spec.query_rows // spec.num_heads
        head_widths = [span.size // of_head * spec.value_head_dim for span in loader.stage.spans(f"{name}.q.weight")]
        self.output = ClosingLinear(loader, f"{name}.o", head_widths, spec.projections.output_bias)
        self.q_norm: NormLayer | AllHeadsNorm | None = None
        self.k_norm: NormLayer | AllHeadsNorm | None = None
        qk_norm = spec.norms.qk_norm
        if qk_norm is not None and spec.norms.norms_all_heads:
            self.q_norm = AllHeadsNorm(loader, f"{name}.q_norm", qk_norm, f"{name}.q")
            self.k_norm = AllHeadsNorm(loader, f"{name}.k_norm", qk_norm, f"{name}.k")
        elif qk_norm is not None:
            self.q_norm = NormLayer(loader, f"{name}.q_norm", qk_norm)
            self.k_norm = None if self._reads_only else NormLayer(loader, f"{name}.k_norm", qk_norm)
        stage = loader.stage
        # The weights of norms without weights.
        self._ones = torch.ones(spec.head_dim, dtype=stage.dtype, device=stage.device)
        factor = spec.projections.value_scale
        self._value_factor = None if factor == 1.0 else torch.tensor([factor], device=stage.device)
        self._query_factors: Tensor | None = None
        if spec.positions.query_scale is not None:
            self._query_factors = query_factors(spec.positions.query_scale, stage.max_model_len).to(stage.device)
        self._sinks = loader.load(f"{name}.sinks.bias") if spec.score.sinks else None
        self.table = tables.of(spec.positions.rope) if spec.positions.rope else None
        self.pages: KVPages | None = None

    def count_heads(self, widths: Sequence[int]) -> list[int]:
        """Numbers of heads of queries, keys and values, for the columns of their projections on a rank."""
        num_heads = [width // self._head_dim for width in widths]
        num_heads[0] //= 1 + self._has_gate
        if self.spec.projections.value_size is not None:
            num_heads[2] = widths[2] // self.spec.value_head_dim
        return [*num_heads, num_heads[1]] if self.spec.projections.value_is_key and not self._reads_only else num_heads

    @property
    def input_form(self) -> InputForm:
        """The form in which this layer reads x best."""
        return self.qkv.input_form

    def cache_parts(self, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """The tensors that `bind_cache` expects, for keys and values of `dtype`."""
        return self.spec.kv_parts(self.num_heads[1], num_blocks, block_size, dtype)

    def bind_cache(self, *pages: Tensor) -> None:
        """Give the layer the memory for its keys and values."""
        self.pages = KVPages(*pages)

    def __call__(self, x: LinearInput, rows: Rows, left: Rows) -> Tensor:
        if self._reads_token:
            assert rows.token_inputs is not None
            x = rows.token_inputs
        assert self.pages is not None
        qkv = self.qkv(x, rows)
        query = self.store_in(qkv, self.num_heads, self.pages, rows)
        if left is not rows:
            query = left.take(query)
        attended = self.attend(query, left)
        if self._has_gate:
            gate = qkv[:, : self.qkv.widths[0]].view(len(qkv), -1, self._head_dim)[:, 1::2]
            gate = gate if left is rows else left.take(gate)
            gate_heads(self._kernels, attended.view(gate.shape), gate)
        return self.output(attended, left)

    def store_in(self, qkv: Tensor, num_heads: Sequence[int], pages: KVPages, rows: Rows) -> Tensor:
        """Normalise and rotate qkv [T, columns], and store keys and values, for the heads of any rank: `num_heads` of
        queries, keys and values, and their pages. Returns the queries [T, heads, head_dim]."""
        if self._reads_only:
            return self._rotated_queries(qkv, num_heads[0], rows.positions)
        q, k, v = self.normed_heads(qkv, num_heads)
        return self.store_heads(q, k, v, pages, rows)

    def store_heads(self, q: Tensor, k: Tensor, v: Tensor, pages: KVPages, rows: Rows) -> Tensor:
        """The same for normalised queries, keys and values [T, heads, head_dim]."""
        rope, positions, slots = self.spec.positions.rope, rows.positions, rows.slots[self.kv_group]
        scales = pages.key_scales, pages.value_scales
        if self.spec.norms.rotated_norm is not None:
            if self.table is not None and rope is not None:
                apply_rope(self._kernels, q, k, positions, self.table, interleaved=rope.interleaved)
            q, k = (rms_norm(self._kernels, x, self._ones, self.spec.norms.rotated_norm.eps) for x in (q, k))
            self._kernels.write_kv(k, v, pages.keys, pages.values, slots, *scales)
        elif self.table is None:
            self._kernels.write_kv(k, v, pages.keys, pages.values, slots, *scales)
        else:
            assert rope is not None
            self._kernels.rope_and_write_kv(
                q, k, v, pages.keys, pages.values, positions, slots, self.table, rope.interleaved, *scales
            )
        if self._query_factors is not None:
            q = scale_rows(self._kernels, q.flatten(1), self._query_factors, positions).view(q.shape)
        return q

    def _rotated_queries(self, q: Tensor, num_heads: int, positions: Tensor) -> Tensor:
        """As `store_in`, for a layer that projects queries only."""
        q, rope = q.view(len(q), num_heads, self._head_dim), self.spec.positions.rope
        q = q if self.q_norm is None else self.q_norm(q)
        if self.table is not None and rope is not None:
            self._kernels.apply_rope(q, positions, self.table, rope.interleaved)
        return q

    def normed_heads(self, qkv: Tensor, num_heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, heads, head_dim] of qkv [T, columns]; the first two normalised."""
        num_tokens, head_dim = len(qkv), self._head_dim
        if not self.spec.norms.norms_all_heads:
            counts = list(num_heads[: len(self.parts)])
            counts[0] *= 1 + self._has_gate
            values: list[Tensor]
            if self.spec.projections.value_size is None:
                q, k, *values = torch.split(qkv.view(num_tokens, -1, head_dim), counts, dim=1)
            else:
                columns = (counts[0] + counts[1]) * head_dim
                q, k = torch.split(qkv[:, :columns].view(num_tokens, -1, head_dim), counts[:2], dim=1)
                values = [qkv[:, columns:].view(num_tokens, counts[2], -1)]
            q = q[:, ::2] if self._has_gate else q
            v = k if self.spec.projections.value_is_key else values[0]
            if self._value_factor is not None:
                v = scale_rows(self._kernels, v.flatten(1), self._value_factor).view(v.shape)
            if self.spec.norms.value_norm is not None:
                v = rms_norm(self._kernels, v, self._ones, self.spec.norms.value_norm.eps)
            return (q, k, v) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k), v)
        assert self.q_norm is not None
        assert self.k_norm is not None
        q, k, v = torch.split(qkv, list(self.qkv.widths), dim=1)
        q, k, v = (x.view(num_tokens, -1, head_dim) for x in (self.q_norm(q), self.k_norm(k), v))
        return q, k, v

    def attend(self, query: Tensor, rows: Rows) -> Tensor:
        """The attention output of `rows`, [Q, local heads * head_dim], for their query [Q, ...]."""
        pages = self.pages
        assert pages is not None
        attended = paged_attention(
            self._kernels,
            query,
            pages.keys,
            pages.values,
            rows.block_tables[self.kv_group],
            rows.query_starts,
            rows.context_lens,
            self.spec.score.scale,
            window=self._window,
            softcap=self.spec.score.softcap,
            key_scales=pages.key_scales,
            value_scales=pages.value_scales,
            sinks=self._sinks,
            chunked=self.spec.mask.chunked,
        )
        return attended.flatten(1)
