"""Checks the kernels that multiply weights, in every precision, for single weights and for many experts."""

from __future__ import annotations

import torch

from shardline.kernels.host.kernels import HostKernels
from shardline.kernels.tensors import QuantizedRows
from shardline.models.feed_forward import Routing
from shardline.runtime.ops.moe import experts, routing
from shardline.weights.base import weight_format
from shardline.weights.formats import int8_fast, packed
from shardline.weights.grouped import GroupedWeight
from shardline.weights.rows import quantize_rows, quantize_rows_reference

from .inputs import Inputs, linear_reference, relative_error


class WeightChecks(Inputs):
    """Every method is a check that returns its relative error."""

    def linear(self) -> float:
        worst = 0.0
        for rows, columns, depth in (
            [(3, 40, 70)] if self.small else [(1, 6144, 4096), (100, 4096, 1600), (600, 200, 96)]
        ):
            x, weight, bias = self.randn(rows, depth), self.randn(columns, depth), self.randn(columns)
            out = self.poison(rows, columns)
            self.kernels.linear(x, weight, bias, out)
            worst = max(worst, relative_error(out, linear_reference(x.cpu(), weight.cpu(), bias.cpu())))
        return worst

    def linear_fp8(self) -> float:
        rows, columns, depth = (3, 40, 70) if self.small else (300, 6144, 4096)
        x, weight, fp8 = self.randn(rows, depth), self.randn(columns, depth), weight_format("fp8")
        expected = fp8.multiply_reference(self.kernels, x.cpu(), weight.cpu(), None, torch.float32)
        return relative_error(fp8.pack_linear(self.kernels, weight)(x, out_dtype=torch.float32), expected)

    def linear_w4a16(self) -> float:
        """The bits equal those of `linear` with the dequantized weight, and a row's bits do not depend on others."""
        worst = 0.0
        for rows, columns, depth, size in (
            [(3, 40, 104, 32)] if self.small else [(300, 6144, 4096, 128), (1, 4096, 14336, 64), (70, 200, 4096, None)]
        ):
            groups = -(-depth // (size or depth))
            weight = GroupedWeight(
                torch.randint(0, 16, (columns, depth), generator=self.rng, dtype=torch.uint8),
                (torch.rand(columns, groups, generator=self.rng) / 16).half(),
                torch.arange(depth) // (size or depth),
                torch.randint(0, 17, (columns, groups), generator=self.rng, dtype=torch.uint8),
            )
            x, dense = self.randn(rows, depth), self.poison(rows, columns)
            linear = packed.Format().pack_linear(self.kernels, weight.to(torch.device(self.device)))
            out, dequantized = linear(x), weight.dequantize(self.dtype)
            worst = max(worst, relative_error(out, linear_reference(x.cpu(), dequantized)))
            assert torch.equal(linear(x[:1]), out[:1]), "a row follows its neighbours"
            self.kernels.linear(x, dequantized.to(self.device), None, dense)
            assert torch.equal(out, dense), "the bits are not those of the dense weight"
        return worst

    def routing(self) -> float:
        """The largest error of a routing weight. Ids are exact."""
        worst = 0.0
        for kind in (
            Routing(8, 2),
            Routing(128, 8, normalized=False),
            Routing(256, 8, scoring="sigmoid", scale=2.5, num_groups=8, top_groups=4, group_score="top2_sum"),
        ):
            logits = torch.randn(10 if self.small else 500, kind.num_experts, generator=self.rng)
            expected_ids, expected = routing.route_experts_reference(logits.double(), kind)
            ids, weights = torch.empty_like(expected_ids), torch.empty(expected.shape)
            ids, weights = ids.to(self.device), weights.to(self.device)
            grouped = (kind.num_groups, kind.top_groups, kind.group_score == "top2_sum")
            is_sigmoid = kind.scoring == "sigmoid"
            self.kernels.route_experts(
                logits.to(self.device),
                None,
                ids,
                weights,
                None,
                None,
                is_sigmoid,
                kind.normalized,
                kind.scale,
                kind.num_experts,
                *grouped,
            )
            assert torch.equal(ids.cpu(), expected_ids), "experts are chosen exactly"
            worst = max(worst, relative_error(weights, expected))
        return worst

    def experts(self) -> float:
        """Both products of a layer, and whether a slot's row has the bits of a linear with its expert alone."""
        tokens, count, k, inner, hidden = (5, 3, 2, 24, 40) if self.small else (300, 8, 2, 768, 1024)
        x, up = self.randn(tokens, hidden), self.randn(count, 2 * inner, hidden) * hidden**-0.5
        down, shared = self.randn(count, hidden, inner) * inner**-0.5, self.randn(tokens, hidden)
        ids = torch.rand(tokens, count, generator=self.rng).topk(k)[1].int().to(self.device)
        weights = torch.rand(tokens, k, generator=self.rng).to(self.device)
        rows, out = self.poison(tokens * k, inner), self.poison(tokens, hidden)
        self.kernels.expert_up(x, ids, 0, False, up, None, "silu", True, rows)
        self.kernels.expert_down(rows, ids, weights, 0, down, None, shared, weights[:, 0].contiguous(), out)
        for expert in range(count):
            product, alone = self.poison(tokens, 2 * inner), self.poison(tokens, inner)
            self.kernels.linear(x, up[expert], None, product)
            self.kernels.activation(product, alone, "silu", True)
            chosen = ids == expert
            # The interpreter's products use BLAS, whose bits depend on the tile.
            same = self.small or torch.equal(rows[chosen.flatten()], alone[chosen.nonzero()[:, 0]])
            assert same, "a slot's bits follow its neighbours"
        by_expert = torch.cat([rows[(ids == expert).flatten()] for expert in range(count)]).cpu()
        expected = experts.expert_down_reference(
            by_expert, ids.cpu(), weights.cpu(), down.cpu(), shared=shared.cpu(), shared_scale=weights[:, 0].cpu()
        )
        return relative_error(out, expected)

    def quantize_rows(self) -> float:
        """Bytes and scales equal the oracle's."""
        x = self.randn(5, 70) if self.small else self.randn(300, 4096)
        expected = quantize_rows_reference(x.cpu())
        values = torch.empty_like(expected.values, device=self.device)
        scales = self.poison(len(x), dtype=torch.float32)
        self.kernels.quantize_rows(x, values, scales, None)
        assert torch.equal(values.cpu(), expected.values), "bytes are exact"
        assert torch.equal(scales.cpu(), expected.scales), "scales are exact"
        return 0.0

    def linear_int8(self) -> float:
        """The bits equal the oracle's."""
        rows, columns, depth = (3, 40, 70) if self.small else (300, 6144, 4096)
        x, weight = self.randn(rows, depth).cpu(), self.randn(columns, depth).cpu()
        expected = int8_fast.Format().multiply_reference(self.kernels, x, weight, None, torch.float32)
        # The weight is rounded on the host, as the oracle's is.
        values, scales = int8_fast.int8_weight_reference(weight)
        panels = torch.nn.functional.pad(values, (0, -depth % 32)).to(self.device)
        quantized, out = self._on_device(quantize_rows_reference(x)), self.poison(rows, columns, dtype=torch.float32)
        self.kernels.linear_int8(*quantized[:4], panels, scales.to(self.device), None, out)
        assert torch.equal(out.cpu(), expected), "int8 products have the oracle's bits"
        return 0.0

    def linear_int4(self) -> float:
        rows, columns, depth = (3, 40, 70) if self.small else (300, 6144, 4096)
        on_host, int4 = HostKernels(), weight_format("int4_fast")
        x, weight = quantize_rows(on_host, self.randn(rows, depth).cpu()), self.randn(columns, depth)
        expected = int4.pack_linear(on_host, weight.cpu())(x, out_dtype=torch.float32)
        out = int4.pack_linear(self.kernels, weight)(self._on_device(x), out_dtype=torch.float32)
        assert torch.equal(out.cpu(), expected), "int4 products have the CPU's bits"
        return 0.0

    def _on_device(self, x: QuantizedRows) -> QuantizedRows:
        return QuantizedRows(*(part.to(self.device) for part in x[:3]), x.in_features, x.dtype)
