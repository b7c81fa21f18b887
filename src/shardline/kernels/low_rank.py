"""Adapters (LoRA) as kernels read them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from shardline.kernels.memory import mapped_empty

RANK_BLOCK = 16
"""Ranks are computed in blocks of so many."""


@dataclass(frozen=True)
class LowRankWeights:
    """The adapters of one linear, a slot each. The linear may stack several parts, such as q, k and v."""

    down: Tensor
    """[num_slots, num_parts * rank blocks, in_features / step, 16 * step]: for each block of ranks and each step of x,
    the weights of the block. The back end says how many numbers of x, which are neighbours for each rank, a step is."""
    up: Tensor
    """[num_slots, max_rank, out_features]: in the memory of a slot lie the parts, one after another, each as [max_rank,
    its columns]. So memory of parts that are left as they are is not touched."""
    ranks: Tensor
    """[num_slots, num_parts] int32; 0: the adapter leaves this part as it is. In host memory, as are the next ones."""
    scales: Tensor
    """[num_slots, num_parts] float32"""
    scaled: Tensor
    """[num_slots, num_parts] int32: whether the part has factors; elsewhere they are 1."""
    bounds: Tensor
    """[num_parts + 1] int64: the columns of each part."""
    factors: Tensor
    """[num_slots, out_features] float32: of the whole outputs (DoRA), where `scaled` is set. Where `down` and `up`
    are."""

    @classmethod
    def empty(
        cls,
        num_slots: int,
        max_rank: int,
        in_features: int,
        widths: tuple[int, ...],
        dtype: torch.dtype,
        *,
        step: int,
        device: torch.device | None = None,
    ) -> LowRankWeights:
        """Slots without adapters, on a device (None: the host). Memory that no adapter needs is not touched, but
        for the rest of a huge page."""
        num_parts, blocks = len(widths), -(-max_rank // RANK_BLOCK)
        down = num_slots, num_parts * blocks, -(-in_features // step), RANK_BLOCK * step
        empty = mapped_empty if device is None else functools.partial(torch.empty, device=device)
        return cls(
            empty(down, dtype=dtype),
            empty((num_slots, max_rank, sum(widths)), dtype=dtype),
            torch.zeros(num_slots, num_parts, dtype=torch.int32),
            torch.zeros(num_slots, num_parts),
            torch.zeros(num_slots, num_parts, dtype=torch.int32),
            torch.tensor([0, *widths]).cumsum(0),
            torch.empty(num_slots, sum(widths), device=device),
        )

    def columns(self, part: int) -> slice:
        """The outputs of a part."""
        return slice(int(self.bounds[part]), int(self.bounds[part + 1]))

    def part_of_down(self, slot: int, part: int) -> Tensor:
        """[rank blocks, in_features / step, 16, step]: the blocks that the adapter's rank needs."""
        first = part * (self.down.shape[1] // self.ranks.shape[1])
        blocks = -(-int(self.ranks[slot, part]) // RANK_BLOCK)
        own = self.down[slot, first : first + blocks]
        return own.view(*own.shape[:2], RANK_BLOCK, own.shape[2] // RANK_BLOCK)

    def part_of_up(self, slot: int, part: int) -> Tensor:
        """[rank, columns of the part]"""
        columns, max_rank = self.columns(part), self.up.shape[1]
        own = self.up[slot].view(-1)[max_rank * columns.start : max_rank * columns.stop]
        return own.view(max_rank, -1)[: int(self.ranks[slot, part])]

    def clear(self, slot: int, count: int = 1) -> None:
        """Empty a slot, or so many from it on."""
        self.ranks[slot : slot + count] = 0

    def put(self, slot: int, part: int, down: Tensor, up: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """Give a part of a slot its weights, down [rank, in_features] and up [local outputs, rank]; they are rounded to
        the activations' dtype. `factors` [local outputs]: of the outputs; None: they are 1."""
        rank, in_features = down.shape
        self.ranks[slot, part] = rank
        packed = self.part_of_down(slot, part)
        blocks, steps, _, step = packed.shape
        if rank % RANK_BLOCK or in_features % step:
            padded = torch.zeros(blocks * RANK_BLOCK, steps * step, dtype=self.down.dtype)
            padded[:rank, :in_features] = down
            down = padded
        packed.copy_(down.reshape(blocks, RANK_BLOCK, steps, step).transpose(1, 2))
        self.part_of_up(slot, part).copy_(up.T)
        self.scales[slot, part] = scale
        self.scaled[slot, part] = factors is not None
        if factors is not None:
            self.factors[slot, self.columns(part)] = factors
