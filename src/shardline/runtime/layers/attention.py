"""Attention over the paged KV cache, heads split over the tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.models.spec import GQA, Rope
from shardline.runtime.layers.context import LayerContext
from shardline.runtime.layers.kv_pages import CachePart, KVPages
from shardline.runtime.layers.linear import ClosingLinear, ColumnLinear
from shardline.runtime.layers.norm import NormLayer
from shardline.runtime.ops.attention import paged_attention
from shardline.runtime.ops.few_rows import AddedRows, HeadNorms, are_few_on_gpu, fits_a_tile, qkv_linear
from shardline.runtime.ops.kv_cache import rope_and_write_kv, write_kv
from shardline.runtime.ops.linear_input import InputForm, LinearInput
from shardline.runtime.ops.rope import rotary_table
from shardline.runtime.step import Queries


class RotaryTables:
    """cos/sin tables of a stage, one per distinct Rope."""

    def __init__(self, max_positions: int, device: torch.device) -> None:
        self._max_positions = max_positions
        self._device = device
        self._tables: dict[Rope, Tensor] = {}

    def of(self, rope: Rope) -> Tensor:
        """[max_positions, rotary_dim] float32, cos beside sin."""
        if rope not in self._tables:
            inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32)
            table = rotary_table(inv_freq, self._max_positions, rope.attention_scaling)
            self._tables[rope] = table.to(self._device)
        return self._tables[rope]


class AttentionLayer:
    """x [T, hidden] -> [Q, hidden]: project, norm, rotate, store KV; of the Q queries attend, project back."""

    def __init__(self, context: LayerContext, name: str, spec: GQA, tables: RotaryTables) -> None:
        self._spec = spec
        self._qkv = ColumnLinear(context, [f"{name}.{part}" for part in ("q", "k", "v")], spec.qkv_bias)
        self._num_heads = [width // spec.head_dim for width in self._qkv.widths]
        head_widths = [span.size for span in context.spans(f"{name}.q.weight")]
        self._output = ClosingLinear(context, f"{name}.o", head_widths, spec.output_bias)
        self._q_norm = NormLayer(context, f"{name}.q_norm", spec.qk_norm) if spec.qk_norm else None
        self._k_norm = NormLayer(context, f"{name}.k_norm", spec.qk_norm) if spec.qk_norm else None
        self._table = tables.of(spec.rope) if spec.rope else None
        self._pages: KVPages | None = None
        self._head_norms: HeadNorms | None = None
        self._takes_one_launch = spec.rope is not None
        """Of few rows on a GPU, up to the written cache."""
        if spec.qk_norm and self._q_norm and self._k_norm:
            weights = self._q_norm.weight, self._k_norm.weight
            self._head_norms = HeadNorms(*weights, spec.qk_norm.eps, spec.qk_norm.weight_offset)
            self._takes_one_launch = spec.qk_norm.kind == "rms" and fits_a_tile(spec.head_dim, spec.rope)

    @property
    def takes(self) -> InputForm:
        """What x may be besides a tensor."""
        return self._qkv.takes

    def cache_parts(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[CachePart, ...]:
        """The tensors that `bind_cache` takes, for keys and values of `dtype`."""
        shape = (num_blocks, self._num_heads[1], block_size, self._spec.head_dim)
        scales = (CachePart(shape[:3], torch.float32),) * 2 if dtype.itemsize == 1 else ()
        return (CachePart(shape, dtype), CachePart(shape, dtype), *scales)

    def bind_cache(self, *pages: Tensor) -> None:
        """Give the layer the memory of its keys and values."""
        self._pages = KVPages(*pages)

    def __call__(
        self, x: LinearInput, positions: Tensor, slots: Tensor, queries: Queries, residual: Tensor | None = None
    ) -> Tensor | AddedRows:
        """`residual`: see ClosingLinear."""
        pages = self._pages
        assert pages is not None
        q = self._stored(x, positions, slots, pages)
        if queries.rows is not None:
            q = torch.index_select(q, 0, queries.rows)
        attended = paged_attention(
            q,
            pages.keys,
            pages.values,
            queries.block_tables,
            queries.starts,
            queries.context_lens,
            self._spec.scale,
            window=self._spec.window,
            softcap=self._spec.softcap,
            key_scales=pages.key_scales,
            value_scales=pages.value_scales,
        )
        return self._output(attended.flatten(1), residual)

    def _stored(self, x: LinearInput, positions: Tensor, slots: Tensor, pages: KVPages) -> Tensor:
        """The queries [T, local heads, head_dim], once the tokens' keys and values are in the cache."""
        plain, rope = self._qkv.plain, self._spec.rope
        if self._takes_one_launch and plain and pages.key_scales is None and are_few_on_gpu(x):
            assert rope is not None
            assert self._table is not None
            return qkv_linear(
                x,
                *plain,
                self._num_heads[0],
                pages.keys,
                pages.values,
                slots,
                positions,
                self._table,
                interleaved=rope.interleaved,
                norms=self._head_norms,
            )
        heads = self._qkv(x).view(len(positions), -1, self._spec.head_dim)
        q, k, v = torch.split(heads, self._num_heads, dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        scales = {"key_scales": pages.key_scales, "value_scales": pages.value_scales}
        if self._table is None:
            write_kv(k, v, pages.keys, pages.values, slots, **scales)
        else:
            assert rope is not None
            rope_and_write_kv(
                q,
                k,
                v,
                pages.keys,
                pages.values,
                slots,
                positions,
                self._table,
                interleaved=rope.interleaved,
                **scales,
            )
        return q
