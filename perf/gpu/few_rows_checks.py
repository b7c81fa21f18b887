"""Checks that fused products (with norms, additions, rotation and KV writes) have the bits of separate ops."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from shardline.kernels.cuda.rows import AddedRows, HeadNorms, UnnormedRows
from shardline.runtime.machines.cuda.fused_layers import add_linear, qkv_linear, unnormed_linear
from shardline.runtime.ops.activation import gated_activation
from shardline.runtime.ops.attention.kv_cache import rope_and_write_kv
from shardline.runtime.ops.attention.rope import rotary_table
from shardline.runtime.ops.norm import rms_norm
from shardline.weights.formats.plain import Format, PlainLinear

from .inputs import Inputs, linear_reference, relative_error


class FewRowsChecks(Inputs):
    """Every method is a check that returns its relative error."""

    def added_and_normed(self) -> float:
        """`add_linear`, then a linear and a gated linear that norm its output, against separate ops."""
        worst, kernels = 0.0, self.kernels
        for rows, hidden, inner in (
            [(3, 70, 40)] if self.small else [(1, 4096, 14336), (17, 896, 4864), (64, 2048, 8192)]
        ):
            added, summed = self._added(rows, inner, hidden)
            unnormed = UnnormedRows(*added, self.randn(hidden), 1e-5, 0.0)
            normed = rms_norm(kernels, summed, unnormed.weight, 1e-5)
            weight = self.randn(2 * inner, hidden)
            linear = self._packed(weight)
            product = unnormed_linear(kernels, unnormed, linear.panels, None)
            gated = unnormed_linear(kernels, unnormed, linear.panels, None, gate="silu")
            expected = linear(normed)
            self._same(added.rows, summed, f"sums of {rows} rows")
            self._same(product, expected, f"products of the norm of {rows} rows")
            self._same(gated, gated_activation(kernels, expected, "silu"), f"gated products of the norm of {rows} rows")
            worst = max(worst, relative_error(product, linear_reference(normed.cpu(), weight.cpu())))
        return worst

    def queries_keys_and_values(self) -> float:
        """`qkv_linear` with and without norms of heads, against separate ops."""
        worst, kernels = 0.0, self.kernels
        shapes = [(3, 70, 3, 2, 32)] if self.small else [(1, 4096, 32, 8, 128), (64, 896, 14, 2, 64)]
        for rows, hidden, heads, kv_heads, dim in shapes:
            added, summed = self._added(rows, 50, hidden)
            unnormed = UnnormedRows(*added, self.randn(hidden), 1e-5, 0.0)
            normed = rms_norm(kernels, summed, unnormed.weight, 1e-5)
            weight, bias = self.randn((heads + 2 * kv_heads) * dim, hidden), self.randn((heads + 2 * kv_heads) * dim)
            linear = self._packed(weight)
            table = rotary_table(1e4 ** (-torch.arange(0, dim, 2) / dim), 4096).to(self.device)
            positions = torch.randint(0, 4096, (rows,), generator=self.rng).to(self.device)
            slots = torch.randperm(rows + 16, generator=self.rng)[:rows].to(self.device)
            product = linear(normed, bias)
            worst = max(worst, relative_error(product, linear_reference(normed.cpu(), weight.cpu(), bias.cpu())))
            head_norms = HeadNorms(self.randn(dim), self.randn(dim), 1e-5, 1.0)
            ways = itertools.product((unnormed, normed), (None, head_norms), (False, True))
            for x, norms, interleaved in ways:
                query, key, value = product.clone().view(rows, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
                if norms is not None:
                    query = rms_norm(kernels, query, norms.query, 1e-5, weight_offset=1.0)
                    key = rms_norm(kernels, key, norms.key, 1e-5, weight_offset=1.0)
                shape = (-(-(rows + 16) // 16), kv_heads, 16, dim)
                expected = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2)]
                actual = [torch.zeros_like(cache) for cache in expected]
                index = (slots, positions, table)
                rope_and_write_kv(kernels, query, key, value, *expected, *index, interleaved=interleaved)
                place = (heads, *actual, *index)
                queries = qkv_linear(kernels, x, linear.panels, bias, *place, interleaved=interleaved, norms=norms)
                for name, ours, theirs in zip("qkv", (queries, *actual), (query, *expected), strict=True):
                    self._same(ours, theirs, f"{name} of {rows} rows, norms: {norms is not None}")
        return worst

    def _added(self, rows: int, depth: int, width: int) -> tuple[AddedRows, Tensor]:
        x, linear = self.randn(rows, depth), self._packed(self.randn(width, depth))
        residual = self.randn(rows, width)
        return add_linear(self.kernels, x, linear.panels, None, residual), linear(x) + residual

    def _packed(self, weight: Tensor) -> PlainLinear:
        return Format().pack_linear(self.kernels, weight)

    def _same(self, ours: Tensor, theirs: Tensor, what: str) -> None:
        assert torch.equal(ours, theirs), f"{what}: one launch and several differ"
