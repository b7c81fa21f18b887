"""Multi-head latent attention over a paged cache of latents; heads are split over the tensor-parallel ranks.

The up-projections are always absorbed (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). A query is multiplied by its
head's part of kv_up for keys, and then attends to the latents themselves. The attention output is multiplied by the
head's part for values. So prefill and decode give the same bits. These are rounded to the activations' dtype: the
latents (after the projection and after the norm), the queries (after each of their projections), a head's attention
output, and its values.
"""

from __future__ import annotations

from torch import Tensor

from shardline.kernels.tensors import InputForm, LatentCache, LinearInput, QuantizedLatents
from shardline.models.attention import Score
from shardline.models.mla import MLA
from shardline.models.parts import KVDType, KVPart
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.linear import ClosingLinear, ColumnLinear
from shardline.runtime.layers.norm import InputNorm, NormLayer
from shardline.runtime.ops.attention.kv_cache import write_latent
from shardline.runtime.ops.attention.latent import mla_attention
from shardline.runtime.ops.attention.linear_heads import PackedHeads, linear_heads, pack_heads
from shardline.runtime.ops.attention.rope import RotaryTables, apply_rope, query_factors
from shardline.runtime.ops.scale import scale_rows
from shardline.runtime.step import Rows


class LatentAttentionLayer:
    """x [T, hidden] -> [Q, hidden], for the Q rows that are left.

    The down-projections to the latents are split over the ranks, and their outputs are gathered. Ranks of one host
    share its memory bandwidth, and otherwise every rank would read these weights in a decode step.

    Ranks may also share one cache. It needs no barrier: each rank normalises, rotates and writes the gathered latents
    itself, so it reads its own bytes or the same bytes from another rank. No rank writes a slot that another rank still
    reads, because the next step begins after the gather in `o`, which a rank enters only after its attention.
    """

    def __init__(self, loader: LayerLoader, name: str, spec: MLA, tables: RotaryTables, kv_group: int) -> None:
        stage, linears, rope = loader.stage, spec.projections, spec.positions.rope
        assert rope is not None, "keys have a rotated part"
        assert spec.score == Score(spec.score.scale), "the kernel has no caps and no sinks"
        self._kv_group = kv_group
        self._spec, self._linears = spec, linears
        self._kernels = stage.kernels
        self._group = stage.group
        self._q_rank = linears.q_lora_rank or 0
        down = [f"{name}.kv_down"] if linears.q_norm is None else [f"{name}.q_down", f"{name}.kv_down"]
        self.down = ColumnLinear(loader, down, linears.bias)
        spans = [stage.spans(f"{part}.weight") for part in down]
        self._down_widths = [sum(span.size for span in of_rank) for of_rank in zip(*spans, strict=True)]
        q = f"{name}.q" if linears.q_norm is None else f"{name}.q_up"
        self.q = ColumnLinear(loader, [q], False)
        self.q_norm: InputNorm | None = None
        if linears.q_norm is not None:
            self.q_norm = InputNorm(loader, f"{name}.q_norm", linears.q_norm, input_form=self.query_form)
        self._kv_norm = NormLayer(loader, f"{name}.kv_norm", linears.kv_norm)
        self._key_up, self._value_up = self._absorb(loader, f"{name}.kv_up")
        num_heads = [span.size // linears.query_head_dim for span in stage.spans(f"{q}.weight")]
        self.output = ClosingLinear(loader, f"{name}.o", [n * spec.value_head_dim for n in num_heads], linears.bias)
        self._table, self._interleaved = tables.of(rope), rope.interleaved
        self._query_factors: Tensor | None = None
        if spec.positions.query_scale is not None:
            self._query_factors = query_factors(spec.positions.query_scale, stage.max_model_len).to(stage.device)
        self._cache: LatentCache | None = None

    @property
    def query_form(self) -> InputForm:
        """The form in which the latents of queries are normalised."""
        return self.q.input_form

    @property
    def input_form(self) -> InputForm:
        """The form in which this layer reads x best."""
        is_read_twice = self.q_norm is None
        return "tensor" if is_read_twice and self.q.input_form != self.down.input_form else self.down.input_form

    def cache_parts(self, num_blocks: int, block_size: int, dtype: KVDType) -> tuple[KVPart, ...]:
        """The tensors that `bind_cache` expects, for latents of `dtype`."""
        return self._spec.kv_parts(1, num_blocks, block_size, dtype)

    def bind_cache(self, *pages: Tensor) -> None:
        """Give the layer its pages."""
        self._cache = pages[0] if len(pages) == 1 else QuantizedLatents(*pages)

    def __call__(self, x: LinearInput, rows: Rows, left: Rows) -> Tensor:
        down = self.gather_down(self.down(x, rows))
        q = self.store(self.project_queries(x, down, rows), down, rows)
        if left is not rows:
            q = left.take(q)
        return self.output(self.attend(q, left), left)

    def gather_down(self, local: Tensor) -> Tensor:
        """Gather the latents of the queries, the latents of keys and values, and the rotated part of the keys."""
        return self._group.all_gather_columns(local, self._down_widths)

    def project_queries(self, x: LinearInput | None, down: Tensor, rows: Rows) -> Tensor:
        """The local queries, computed from x, or from `down` alone if queries have a latent."""
        if self.q_norm is None:
            assert x is not None
            return self.q(x, rows)
        return self.q(self.q_norm(down[:, : self._q_rank])[0], rows)

    def store(self, q: Tensor, down: Tensor, rows: Rows) -> Tensor:
        """Normalise, rotate and cache the projected latents. Returns the queries [T, local heads, query_head_dim]."""
        assert self._cache is not None
        linears, positions, slots = self._linears, rows.positions, rows.slots[self._kv_group]
        q = q.view(len(positions), -1, linears.query_head_dim)
        latent = self._kv_norm(down[:, self._q_rank : self._q_rank + linears.kv_lora_rank])
        k_rope = down[:, self._q_rank + linears.kv_lora_rank :]
        q_rope = q[..., linears.nope_head_dim :]
        apply_rope(self._kernels, q_rope, k_rope[:, None], positions, self._table, interleaved=self._interleaved)
        write_latent(self._kernels, latent, k_rope, self._cache, slots)
        if self._query_factors is not None:
            q = scale_rows(self._kernels, q.flatten(1), self._query_factors, positions).view(q.shape)
        return q

    def attend(self, q: Tensor, rows: Rows) -> Tensor:
        """The attention output of `rows`, [Q, local heads * value_head_dim], for their q [Q, ...]."""
        assert self._cache is not None
        nope, kernels = self._linears.nope_head_dim, self._kernels
        attended = self.attend_latents(linear_heads(kernels, q[..., :nope], self._key_up), q[..., nope:], rows)
        return linear_heads(kernels, attended, self._value_up).flatten(1)

    def attend_latents(self, query_latent: Tensor, query_rope: Tensor, rows: Rows) -> Tensor:
        """Attention in the dims of the latents, [Q, local heads, kv_lora_rank]."""
        assert self._cache is not None
        return mla_attention(
            self._kernels,
            query_latent,
            query_rope,
            self._cache,
            rows.block_tables[self._kv_group],
            rows.query_starts,
            rows.context_lens,
            self._spec.score.scale,
        )

    def _absorb(self, loader: LayerLoader, name: str) -> tuple[PackedHeads, PackedHeads]:
        """The two parts of kv_up: [heads, kv_lora_rank, nope] for queries, [heads, value, kv_lora_rank] for outputs."""
        linears = self._linears
        weight = loader.read(f"{name}.weight").view(-1, linears.up_head_dim, linears.kv_lora_rank)
        key_up = pack_heads(self._kernels, weight[:, : linears.nope_head_dim].transpose(1, 2))
        value_up = pack_heads(self._kernels, weight[:, linears.nope_head_dim :])
        loader.on_loaded(key_up.panels.nbytes + value_up.panels.nbytes)
        return key_up, value_up
