"""The layers of a decode step in as few kernel launches as possible: five for a dense layer in the activations' dtype.

They wrap a stage's ordinary layers and read their weights. The bits are the same as with one op after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.deployment.kernel_cases import fits_tile
from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.rows import AddedRows, HeadNorms, UnnormedRows
from shardline.kernels.cuda.triton import linear as products
from shardline.kernels.cuda.triton import qkv_linear as qkv_kernel
from shardline.kernels.tensors import LinearInput
from shardline.runtime.decoder import DecoderLayer, DecoderStage
from shardline.runtime.layers.attention import AttentionLayer
from shardline.runtime.layers.feed_forward import ActivatedLinear, DenseFeedForward
from shardline.runtime.layers.linear import ClosingLinear, ColumnLinear, GatedColumnLinear
from shardline.runtime.layers.mla import LatentAttentionLayer
from shardline.runtime.layers.norm import InputNorm, NoNorm, NormLayer
from shardline.runtime.step import Rows, StepInput
from shardline.weights.base import PackedGatedLinear, PackedLinear
from shardline.weights.formats.plain import PlainGatedLinear, PlainLinear

FEW_ROWS = 64
"""The most rows that these products take: those of one tile."""


def add_linear(kernels: CudaKernels, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> AddedRows:
    """residual [M, N] + the linear of x [M, K] with `weight` [N, K], rounded again after the addition. It comes with
    the sums of squares from which the next norm starts."""
    out = kernels.activation_empty(residual.dtype, *residual.shape)
    runs = products.runs_of_row(len(x), residual.shape[1], x.dtype)
    square_sums = kernels.activation_empty(torch.float32, len(x), runs)
    products.add_linear(x, weight, bias, residual, out, square_sums)
    return AddedRows(out, square_sums)


def unnormed_linear(
    kernels: CudaKernels,
    x: UnnormedRows,
    weight: Tensor,
    bias: Tensor | None,
    *,
    gate: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The linear of the norm of x [M, K], gated if `gate` names an activation: [M, N] of `out_dtype` (default: x's
    dtype)."""
    width = len(weight) // (1 if gate is None else 2)
    out = kernels.activation_empty(out_dtype or x.dtype, len(x.rows), width)
    products.linear(x, weight, bias, out, gate)
    return out


def qkv_linear(
    kernels: CudaKernels,
    x: Tensor | UnnormedRows,
    weight: Tensor,
    bias: Tensor | None,
    num_heads: int,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: Tensor,
    *,
    interleaved: bool,
    norms: HeadNorms | None,
) -> Tensor:
    """The linear, then `rms_norm` of query and key heads if they have norms, then `rope_and_write_kv`. Returns the
    queries [M, num_heads, D]. The caches hold elements of x's dtype. All heads have the same D, which is even."""
    head_dim, num_rows = key_cache.shape[3], len(slots)
    query = kernels.activation_empty(x.dtype, num_rows, num_heads, head_dim)
    head_norms = (None, None, 0.0, 0.0) if norms is None else norms
    qkv_kernel.qkv_linear(
        x, weight, bias, query, key_cache, value_cache, slots, positions, table, interleaved, *head_norms
    )
    return query


class _Stream(NamedTuple):
    """The residual stream between two blocks. Either `delta` is still to be added, or `square_sums` are those of
    `hidden`."""

    hidden: Tensor
    delta: Tensor | None = None
    square_sums: Tensor | None = None


def _plain_weight(linear: PackedLinear | PackedGatedLinear) -> Tensor | None:
    """The rows of a weight in the activations' dtype; None if the weight has another format."""
    return linear.panels if isinstance(linear, (PlainLinear, PlainGatedLinear)) else None


def _normed(
    norm: InputNorm | NoNorm, stream: _Stream, *, reads_unnormed: bool
) -> tuple[LinearInput | UnnormedRows, Tensor]:
    """The input of the products after a norm, and the residual stream after the addition before the norm."""
    assert isinstance(norm, InputNorm), "see deployment.gpu_support"
    spec = norm.spec
    if stream.square_sums is not None and reads_unnormed and spec.kind == "rms":
        rows = UnnormedRows(stream.hidden, stream.square_sums, norm.weight, spec.eps, spec.kernel_offset)
        return rows, stream.hidden
    return norm(stream.hidden, stream.delta)


class _Projection:
    """A column linear that can normalise its input rows while it loads them."""

    def __init__(self, kernels: CudaKernels, linear: ColumnLinear) -> None:
        self._kernels = kernels
        self._linear = linear
        self.weight = _plain_weight(linear.packed)
        self.bias = linear.bias

    def __call__(self, x: LinearInput | UnnormedRows, rows: Rows) -> Tensor:
        if not isinstance(x, UnnormedRows):
            return self._linear(x, rows)
        assert self.weight is not None
        return unnormed_linear(self._kernels, x, self.weight, self.bias)


class _Output:
    """The projection that ends a block, with the residual addition if one launch can do both."""

    def __init__(self, kernels: CudaKernels, output: ClosingLinear) -> None:
        self._kernels = kernels
        self._output = output
        self._weight = _plain_weight(output.packed) if output.group.size == 1 else None

    def __call__(self, x: Tensor, hidden: Tensor, rows: Rows, *, adds: bool) -> Tensor | AddedRows:
        if not adds or self._weight is None:
            return self._output(x, rows)
        return add_linear(self._kernels, x, self._weight, self._output.bias, hidden)


class _FusedAttention:
    """Grouped-query attention. The product for q, k and v, their norms, the rotation and the KV write are one launch if
    possible."""

    def __init__(self, kernels: CudaKernels, layer: AttentionLayer) -> None:
        self._kernels = kernels
        self._layer = layer
        self._qkv = _Projection(kernels, layer.qkv)
        self._output = _Output(kernels, layer.output)
        self.reads_unnormed = self._qkv.weight is not None
        spec = layer.spec
        self._fits_one_launch = spec.positions.rope is not None and self.reads_unnormed
        self._head_norms: HeadNorms | None = None
        if (norm := spec.norms.qk_norm) and isinstance(layer.q_norm, NormLayer) and isinstance(layer.k_norm, NormLayer):
            self._head_norms = HeadNorms(layer.q_norm.weight, layer.k_norm.weight, norm.eps, norm.kernel_offset)
            self._fits_one_launch &= norm.kind == "rms" and fits_tile(spec.head_dim, spec.positions.rope)

    def __call__(
        self,
        x: LinearInput | UnnormedRows,
        rows: Rows,
        left: Rows,
        hidden: Tensor,
        adds: bool,
    ) -> Tensor | AddedRows:
        query = self._store(x, rows)
        if left is not rows:
            query = left.take(query)
        return self._output(self._layer.attend(query, left), hidden, left, adds=adds)

    def _store(self, x: LinearInput | UnnormedRows, rows: Rows) -> Tensor:
        layer, weight = self._layer, self._qkv.weight
        pages, rope, table = layer.pages, layer.spec.positions.rope, layer.table
        assert pages is not None
        if not self._fits_one_launch or pages.key_scales is not None:
            return layer.store(self._qkv(x, rows), rows)
        assert isinstance(x, (Tensor, UnnormedRows))
        assert weight is not None
        assert rope is not None
        assert table is not None
        return qkv_linear(
            self._kernels,
            x,
            weight,
            self._qkv.bias,
            layer.num_heads[0],
            pages.keys,
            pages.values,
            rows.slots[layer.kv_group],
            rows.positions,
            table,
            interleaved=rope.interleaved,
            norms=self._head_norms,
        )


class _FusedLatentAttention:
    """Latent attention: fuses the norm into the down-projections, and the residual addition into the last
    projection."""

    def __init__(self, kernels: CudaKernels, layer: LatentAttentionLayer) -> None:
        self._layer = layer
        self._down = _Projection(kernels, layer.down)
        self._q = _Projection(kernels, layer.q)
        self._output = _Output(kernels, layer.output)
        self.reads_unnormed = self._down.weight is not None and (layer.q_norm is not None or self._q.weight is not None)

    def __call__(
        self,
        x: LinearInput | UnnormedRows,
        rows: Rows,
        left: Rows,
        hidden: Tensor,
        adds: bool,
    ) -> Tensor | AddedRows:
        layer = self._layer
        down = layer.gather_down(self._down(x, rows))
        q = self._q(x, rows) if layer.q_norm is None else layer.project_queries(None, down, rows)
        q = layer.store(q, down, rows)
        if left is not rows:
            q = left.take(q)
        return self._output(layer.attend(q, left), hidden, left, adds=adds)


class _FusedFeedForward:
    """A dense block: fuses the norm into gate and up, and the residual addition into `down`."""

    def __init__(self, kernels: CudaKernels, block: DenseFeedForward) -> None:
        self._kernels = kernels
        self._inner = block.inner
        self._output = _Output(kernels, block.down)
        self._up: _Projection | None = None
        if isinstance(block.inner, ActivatedLinear):
            self._up = _Projection(kernels, block.inner.up)
            self._weight = self._up.weight
        else:
            self._weight = _plain_weight(block.inner.packed)
        self.reads_unnormed = self._weight is not None

    def __call__(self, x: LinearInput | UnnormedRows, hidden: Tensor, rows: Rows, *, adds: bool) -> Tensor | AddedRows:
        return self._output(self._activated(x, rows), hidden, rows, adds=adds)

    def _activated(self, x: LinearInput | UnnormedRows, rows: Rows) -> Tensor:
        inner = self._inner
        if not isinstance(x, UnnormedRows):
            return inner(x, rows)
        if isinstance(inner, GatedColumnLinear):
            assert self._weight is not None
            return unnormed_linear(self._kernels, x, self._weight, inner.bias, gate=inner.activation)
        assert self._up is not None
        return inner.activate(self._up(x, rows))


class FusedLayer:
    """The fused form of one ordinary layer."""

    def __init__(self, kernels: CudaKernels, layer: DecoderLayer) -> None:
        self._layer = layer
        attention = layer.attention
        self._attention: _FusedAttention | _FusedLatentAttention
        if isinstance(attention, AttentionLayer):
            self._attention = _FusedAttention(kernels, attention)
        else:
            self._attention = _FusedLatentAttention(kernels, attention)
        self._feed_forward: _FusedFeedForward | None = None
        if isinstance(layer.feed_forward, DenseFeedForward):
            self._feed_forward = _FusedFeedForward(kernels, layer.feed_forward)

    def __call__(self, stream: _Stream, rows: Rows) -> tuple[_Stream, Rows]:
        """The stream after this layer, and the rows that are left."""
        layer, attention = self._layer, self._attention
        left = layer.rows_left(rows)
        normed, hidden = _normed(layer.attention_norm, stream, reads_unnormed=attention.reads_unnormed)
        if left is not rows:
            hidden = left.take(hidden)
        post = layer.post_attention_norm
        stream = _added(hidden, attention(normed, rows, left, hidden, adds=post is None), post)
        block = self._feed_forward
        normed, hidden = _normed(
            layer.feed_forward_norm, stream, reads_unnormed=block is not None and block.reads_unnormed
        )
        post = layer.post_feed_forward_norm
        if block is None:
            assert not isinstance(normed, UnnormedRows)
            return _added(hidden, layer.feed_forward(normed, left, hidden), post), left
        return _added(hidden, block(normed, hidden, left, adds=post is None), post), left


def _added(hidden: Tensor, delta: Tensor | AddedRows, post_norm: object) -> _Stream:
    """The residual stream after a block with output `delta`."""
    if isinstance(delta, AddedRows):
        return _Stream(delta.rows, None, delta.square_sums)
    return _Stream(hidden, post_norm(delta) if callable(post_norm) else delta)


class CudaFusedLayers:
    """See `base.FusedLayers`."""

    def __init__(self, kernels: CudaKernels, stage: DecoderStage) -> None:
        self._layers: Sequence[FusedLayer] = [FusedLayer(kernels, layer) for layer in stage.layers]

    def fits_step(self, step: StepInput) -> bool:
        return len(step.rows) <= FEW_ROWS

    def __call__(self, step: StepInput, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        stream, rows = _Stream(hidden), step.rows
        for layer in self._layers:
            stream, rows = layer(stream, rows)
        return stream.hidden, stream.delta
