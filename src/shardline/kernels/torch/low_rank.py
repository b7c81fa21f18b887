"""Products of adapters, those of each adapter with its rows.

Sums are fp32, in tiles as those of weights: `RANK_BLOCK` columns of `down`, and `COLUMNS` columns of `up`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.low_rank import RANK_BLOCK, LowRankWeights
from shardline.kernels.tensors import RowBias
from shardline.kernels.torch.experts import ExpertKernels, slots_of
from shardline.kernels.torch.kv_cache import Kept
from shardline.kernels.torch.linear import COLUMNS, multiply_tiles

_Groups = list[tuple[int, Tensor]]
"""The rows of each slot."""


class LowRankKernels(ExpertKernels):
    """See `runtime.ops.adapters.low_rank`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.low_rank_shapes: set[tuple[int, int]] = set()
        """Number of columns of x, and of blocks of ranks, of the adapters for which there is memory."""
        self._grouped = Kept()

    def low_rank_empty(
        self, num_slots: int, max_rank: int, in_features: int, widths: tuple[int, ...], dtype: torch.dtype
    ) -> LowRankWeights:
        self.low_rank_shapes.add((in_features, -(-max_rank // RANK_BLOCK)))
        sizes = num_slots, max_rank, in_features, widths, dtype
        return LowRankWeights.empty(*sizes, step=in_features, device=self.device)

    def low_rank(self, x: Tensor, slots: Tensor, weights: LowRankWeights, bias: Tensor | None, scaled: bool) -> RowBias:
        groups = self._grouped.value_of((slots,), None, lambda: _group(slots))  # waits for a device
        return self._row_bias(x, groups, weights, bias, bias, scaled)

    def expert_low_rank(
        self,
        x: Tensor,
        ids: Tensor,
        first_expert: int,
        num_experts: int,
        compact: bool,
        sorted: bool,
        adapters: Tensor,
        weights: LowRankWeights,
        bias: Tensor | None,
        scaled: bool,
    ) -> RowBias:
        slots = slots_of(ids, first_expert, num_experts)
        chosen = adapters.index_select(0, slots.tokens(ids))
        experts = slots.experts()
        rows = x[: len(experts)] if sorted else slots.rows(x, ids, compact)
        groups = _group(torch.where(chosen < 0, -1, chosen * num_experts + experts))
        own_bias = None if bias is None else bias.index_select(0, experts)
        return self._row_bias(rows, groups, weights, bias, own_bias, scaled)

    def multiply_low_rank(self, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        """scale * up (down x) for rows x [M, K]; down [rank blocks, 16, K], up [rank, N]: [M, N] float32."""
        depth = down.shape[1] * len(down)
        up = F.pad(up.float(), (0, -up.shape[1] % COLUMNS, 0, depth - len(up)))
        tiles = up.view(depth, -1, COLUMNS).transpose(0, 1).contiguous().mT
        product: Tensor
        if self.is_exact:
            product = multiply_tiles(multiply_tiles(x.float(), down.float(), None) * scale, tiles, None)
        else:
            product = (x.float() @ down.view(depth, -1).float().T * scale) @ up
        return product

    def _row_bias(
        self,
        x: Tensor,
        groups: _Groups,
        weights: LowRankWeights,
        bias: Tensor | None,
        bias_of_rows: Tensor | None,
        scaled: bool,
    ) -> RowBias:
        shape = len(x), weights.up.shape[2]
        added = torch.full(shape, -0.0, device=x.device)  # this changes no number to which it is added
        all_factors = torch.ones(shape, device=x.device) if scaled else None
        for slot, places in groups:
            rows = x.index_select(0, places)
            for part, rank in enumerate(weights.ranks[slot].tolist()):
                if not rank:
                    continue
                columns, scale = weights.columns(part), float(weights.scales[slot, part])
                down = weights.part_of_down(slot, part).squeeze(1)
                product = self.multiply_low_rank(rows, down, weights.part_of_up(slot, part), scale)
                own = product[:, : columns.stop - columns.start]
                if all_factors is not None and weights.scaled[slot, part]:
                    factors = weights.factors[slot, columns]
                    own = own * factors
                    if bias_of_rows is not None:  # which is a part of the product that has factors
                        own_bias = bias_of_rows if bias_of_rows.dim() == 1 else bias_of_rows.index_select(0, places)
                        own = own + own_bias[..., columns].float() * (1 - factors)
                    all_factors[:, columns].index_copy_(0, places, factors.expand(len(places), -1))
                added[:, columns].index_copy_(0, places, own)
        return RowBias(bias, added, all_factors)


def _group(slots: Tensor) -> _Groups:
    on_host = slots.cpu()
    chosen = sorted(slot for slot in set(on_host.tolist()) if slot >= 0)
    return [(slot, (on_host == slot).nonzero()[:, 0].to(slots.device)) for slot in chosen]
