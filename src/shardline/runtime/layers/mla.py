"""Multi-head latent attention over a paged cache of latents, heads split over the tensor-parallel ranks.

Always absorbed (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): a query meets the latents themselves, after it went
through its head's part of kv_up for keys, and what it collects goes through the part for values. Prefill and decode
then have one set of bits. Rounded to the activations' dtype are: the latents (once after the projection, once after the
norm), the queries after each of their projections, what a head collects, and its values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.models.spec import MLA
from shardline.runtime.layers.attention import RotaryTables
from shardline.runtime.layers.context import LayerContext
from shardline.runtime.layers.kv_pages import CachePart
from shardline.runtime.layers.linear import ClosingLinear, ColumnLinear
from shardline.runtime.layers.norm import InputNorm, NormLayer
from shardline.runtime.ops.few_rows import AddedRows
from shardline.runtime.ops.kv_cache import LatentCache, QuantizedLatents, write_latent
from shardline.runtime.ops.linear_heads import PackedHeads, linear_heads, pack_heads
from shardline.runtime.ops.linear_input import InputForm, LinearInput
from shardline.runtime.ops.mla_attention import mla_attention
from shardline.runtime.ops.rope import apply_rope
from shardline.runtime.step import Queries


class LatentAttentionLayer:
    """x [T, hidden] -> [Q, hidden], of the Q queries.

    The projections down to the latents are split over the ranks and gathered: ranks of one host share its memory's
    bandwidth, and a decode step would read them once per rank otherwise.

    Ranks also share one cache. No barrier guards it: each norms, rotates and writes the gathered latents itself, so
    that it reads what it has written, or the same bytes from another. And nobody writes a slot that another still
    reads: the next step begins after the gather in `o`, which a rank enters when it has attended.
    """

    def __init__(self, context: LayerContext, name: str, spec: MLA, tables: RotaryTables) -> None:
        self._spec = spec
        self._group = context.group
        self._q_rank = spec.q_lora_rank or 0
        down = [f"{name}.kv_down"] if spec.q_norm is None else [f"{name}.q_down", f"{name}.kv_down"]
        self._down = ColumnLinear(context, down, spec.bias)
        spans = [context.spans(f"{part}.weight") for part in down]
        self._down_widths = [sum(span.size for span in of_rank) for of_rank in zip(*spans, strict=True)]
        q = f"{name}.q" if spec.q_norm is None else f"{name}.q_up"
        self._q = ColumnLinear(context, [q], False)
        self._q_norm: InputNorm | None = None
        if spec.q_norm is not None:
            self._q_norm = InputNorm(context, f"{name}.q_norm", spec.q_norm, takes=self._q.takes)
        self._kv_norm = NormLayer(context, f"{name}.kv_norm", spec.kv_norm)
        self._key_up, self._value_up = self._absorb(context, f"{name}.kv_up")
        num_heads = [span.size // spec.query_head_dim for span in context.spans(f"{q}.weight")]
        self._output = ClosingLinear(context, f"{name}.o", [n * spec.value_head_dim for n in num_heads], spec.bias)
        self._table = tables.of(spec.rope)
        self._cache: LatentCache | None = None

    @property
    def takes(self) -> InputForm:
        """What x may be besides a tensor."""
        is_read_twice = self._q_norm is None
        return "tensor" if is_read_twice and self._q.takes != self._down.takes else self._down.takes

    def cache_parts(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[CachePart, ...]:
        """The tensors that `bind_cache` takes."""
        if dtype.itemsize > 1:
            return (CachePart((num_blocks, block_size, self._spec.latent_dim), dtype),)
        return (
            CachePart((num_blocks, block_size, self._spec.kv_lora_rank), dtype),
            CachePart((num_blocks, block_size, self._spec.rope_head_dim), torch.bfloat16),
            CachePart((num_blocks, block_size), torch.float32),
        )

    def bind_cache(self, *pages: Tensor) -> None:
        """Give the layer its pages."""
        self._cache = pages[0] if len(pages) == 1 else QuantizedLatents(*pages)

    def __call__(
        self, x: LinearInput, positions: Tensor, slots: Tensor, queries: Queries, residual: Tensor | None = None
    ) -> Tensor | AddedRows:
        """`residual`: see ClosingLinear."""
        assert self._cache is not None
        spec = self._spec
        down = self._group.all_gather_columns(self._down(x), self._down_widths)
        q_latent = x if self._q_norm is None else self._q_norm(down[:, : self._q_rank])[0]
        q = self._q(q_latent).view(len(positions), -1, spec.query_head_dim)
        latent = self._kv_norm(down[:, self._q_rank : self._q_rank + spec.kv_lora_rank])
        k_rope = down[:, self._q_rank + spec.kv_lora_rank :]
        q_rope = q[..., spec.nope_head_dim :]
        apply_rope(q_rope, k_rope[:, None], positions, self._table, interleaved=spec.rope.interleaved)
        write_latent(latent, k_rope, self._cache, slots)
        if queries.rows is not None:
            q = torch.index_select(q, 0, queries.rows)
        attended = mla_attention(
            linear_heads(q[..., : spec.nope_head_dim], self._key_up),
            q[..., spec.nope_head_dim :],
            self._cache,
            queries.block_tables,
            queries.starts,
            queries.context_lens,
            spec.scale,
        )
        return self._output(linear_heads(attended, self._value_up).flatten(1), residual)

    def _absorb(self, context: LayerContext, name: str) -> tuple[PackedHeads, PackedHeads]:
        """kv_up in its two parts: [heads, kv_lora_rank, nope] for queries, [heads, value, kv_lora_rank] for outputs."""
        spec = self._spec
        weight = context.read(f"{name}.weight").view(-1, spec.nope_head_dim + spec.value_head_dim, spec.kv_lora_rank)
        key_up = pack_heads(weight[:, : spec.nope_head_dim].transpose(1, 2))
        value_up = pack_heads(weight[:, spec.nope_head_dim :])
        context.on_loaded(key_up.panels.nbytes + value_up.panels.nbytes)
        return key_up, value_up
