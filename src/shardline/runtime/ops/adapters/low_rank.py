"""What adapters add to the outputs of a linear: scale * up (down x), each row with its own adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

RANK_BLOCK = 16
"""Ranks are computed in blocks of so many."""
_ROW_WORDS = 7
"""Words that the kernel needs for each row to sort rows by adapter."""


class LowRankKernels(Protocol):
    """The kernels of adapters."""

    def activation_empty(self, dtype: torch.dtype, /, *sizes: int) -> Tensor: ...
    def low_rank(
        self,
        x: Tensor,
        slots: Tensor,
        down: Tensor,
        up: Tensor,
        ranks: Tensor,
        scales: Tensor,
        factors: Tensor,
        scaled: Tensor,
        bounds: Tensor,
        bias: Tensor | None,
        hidden: Tensor,
        order: Tensor,
        out: Tensor,
        /,
    ) -> None: ...
    def expert_low_rank(
        self,
        x: Tensor,
        ids: Tensor,
        first_expert: int,
        num_experts: int,
        compact: bool,
        sorted: bool,
        adapters: Tensor,
        down: Tensor,
        up: Tensor,
        ranks: Tensor,
        scales: Tensor,
        factors: Tensor,
        scaled: Tensor,
        bounds: Tensor,
        bias: Tensor | None,
        hidden: Tensor,
        order: Tensor,
        out: Tensor,
        /,
    ) -> None: ...


@dataclass(frozen=True)
class LowRankWeights:
    """The adapters of one linear, a slot each. The linear may stack several parts, such as q, k and v."""

    down: Tensor
    """[num_slots, num_parts * rank blocks, in_features / step, 16 * step]: for each block of ranks and each step of x,
    the weights of the block. A step is one number of x, or in bf16 two, which are neighbours for each rank."""
    up: Tensor
    """[num_slots, max_rank, out_features]: in the memory of a slot lie the parts, one after another, each as [max_rank,
    its columns]. So memory of parts that are left as they are is not touched."""
    ranks: Tensor
    """[num_slots, num_parts] int32; 0: the adapter leaves this part as it is."""
    scales: Tensor
    """[num_slots, num_parts] float32"""
    factors: Tensor
    """[num_slots, out_features] float32: of the whole outputs (DoRA), where `scaled` is set."""
    scaled: Tensor
    """[num_slots, num_parts] int32: whether the part has factors; elsewhere they are 1."""
    bounds: Tensor
    """[num_parts + 1] int64: the columns of each part."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All of them, as the kernels take them."""
        return self.down, self.up, self.ranks, self.scales, self.factors, self.scaled, self.bounds

    @classmethod
    def empty(
        cls, num_slots: int, max_rank: int, in_features: int, widths: tuple[int, ...], dtype: torch.dtype
    ) -> LowRankWeights:
        """Slots without adapters. Memory that no adapter needs is not touched."""
        step, blocks = _step(dtype), -(-max_rank // RANK_BLOCK)
        num_parts = len(widths)
        return cls(
            torch.empty(num_slots, num_parts * blocks, -(-in_features // step), RANK_BLOCK * step, dtype=dtype),
            torch.empty(num_slots, max_rank, sum(widths), dtype=dtype),
            torch.zeros(num_slots, num_parts, dtype=torch.int32),
            torch.zeros(num_slots, num_parts),
            torch.empty(num_slots, sum(widths)),
            torch.zeros(num_slots, num_parts, dtype=torch.int32),
            torch.tensor([0, *widths]).cumsum(0),
        )

    def part_of_up(self, slot: int, part: int) -> Tensor:
        """[max_rank, columns of the part]"""
        begin, end = int(self.bounds[part]), int(self.bounds[part + 1])
        max_rank = self.up.shape[1]
        return self.up[slot].view(-1)[max_rank * begin : max_rank * end].view(max_rank, -1)

    def clear(self, slot: int, count: int = 1) -> None:
        """Empty a slot, or so many from it on."""
        self.ranks[slot : slot + count] = 0

    def put(self, slot: int, part: int, down: Tensor, up: Tensor, scale: float, factors: Tensor | None = None) -> None:
        """Give a part of a slot its weights, down [rank, in_features] and up [local outputs, rank]; they are rounded to
        the activations' dtype. `factors` [local outputs]: of the outputs; None: they are 1."""
        rank, in_features = down.shape
        dtype, step = self.down.dtype, _step(self.down.dtype)
        blocks = -(-rank // RANK_BLOCK)
        if rank % RANK_BLOCK or in_features % step:
            padded = torch.zeros(blocks * RANK_BLOCK, -(-in_features // step) * step, dtype=dtype)
            padded[:rank, :in_features] = down
            down = padded
        first = part * (self.down.shape[1] // self.ranks.shape[1])
        packed = self.down[slot, first : first + blocks].view(blocks, -1, RANK_BLOCK, step)
        packed.copy_(down.reshape(blocks, RANK_BLOCK, -1, step).transpose(1, 2))
        begin, end = int(self.bounds[part]), int(self.bounds[part + 1])
        self.part_of_up(slot, part)[:rank] = up.T
        self.scales[slot, part] = scale
        self.scaled[slot, part] = factors is not None
        if factors is not None:
            self.factors[slot, begin:end] = factors
        self.ranks[slot, part] = rank


def low_rank(
    kernels: LowRankKernels,
    x: Tensor,
    slots: Tensor,
    weights: LowRankWeights,
    bias: Tensor | None = None,
    *,
    scaled: bool = False,
) -> Tensor:
    """bias + factor * scale * up (down x) for the rows x [M, in_features], float32 [M, out_features]. With `scaled`,
    [M, 2, out_features]: the factors of outputs come behind; without, they must all be 1.

    `slots` [M] int32: the adapter of each row; negative: none, so that the row is the bias, or -0, which changes
    nothing when it is added. Sums are fp32: those over in_features in a few chains, those over the rank in one, and
    the scale is applied between them. The bits of a row depend on that row and its adapter alone.
    """
    out = kernels.activation_empty(torch.float32, len(x), *[2] * scaled, weights.up.shape[2])
    kernels.low_rank(x, slots, *weights.tensors, bias, *_scratch(kernels, len(x), weights), out)
    return out


def expert_low_rank(
    kernels: LowRankKernels,
    x: Tensor,
    ids: Tensor,
    adapters: Tensor,
    weights: LowRankWeights,
    num_experts: int,
    bias: Tensor | None = None,
    *,
    first_expert: int = 0,
    compact: bool = False,
    sorted: bool = False,
    scaled: bool = False,
) -> Tensor:
    """`low_rank` for the rows of `expert_up` and `expert_down` on a CPU: float32 [T * k, 1, out_features], or with
    `scaled` [T * k, 2, out_features]; rows after those of the experts are undefined.

    `ids` [T, k], `first_expert`, `compact`: see `expert_up`. `adapters` [T] int32: of each token. The weights of
    adapter a for expert e have the slot a * num_experts + e. `bias` [num_experts, out_features]: that of each expert.
    x: the input of `expert_up`, or with `sorted` that of `expert_down`.
    """
    num_rows = ids.numel()
    out = kernels.activation_empty(torch.float32, num_rows, 1 + scaled, weights.up.shape[2])
    scratch = _scratch(kernels, num_rows, weights)
    chosen = ids, first_expert, num_experts, compact, sorted, adapters
    kernels.expert_low_rank(x, *chosen, *weights.tensors, bias, *scratch, out)
    return out


def _scratch(kernels: LowRankKernels, num_rows: int, weights: LowRankWeights) -> tuple[Tensor, Tensor]:
    """Memory for the products with `down`, and for the order of rows."""
    hidden = kernels.activation_empty(torch.float32, num_rows, weights.down.shape[1] * RANK_BLOCK)
    return hidden, kernels.activation_empty(torch.int32, len(weights.ranks) + num_rows * _ROW_WORDS)


def low_rank_reference(
    x: Tensor, slots: Tensor, weights: LowRankWeights, bias: Tensor | None = None, *, scaled: bool = False
) -> Tensor:
    """`low_rank` in plain torch, in float64 until the last rounding."""
    num_slots, num_parts = weights.ranks.shape
    step = _step(x.dtype)
    blocks = weights.down.shape[1] // num_parts
    down = weights.down.view(num_slots, num_parts, blocks, -1, RANK_BLOCK, step).transpose(3, 4)
    down = down.reshape(num_slots, num_parts, blocks * RANK_BLOCK, -1)[..., : x.shape[1]].double()
    base = torch.zeros(weights.up.shape[2], dtype=torch.float64) if bias is None else bias.double()
    out = base.repeat(len(x), 1)
    factors = torch.ones_like(out)
    for row, slot in enumerate(slots.tolist()):
        for part in range(num_parts if slot >= 0 else 0):
            rank = int(weights.ranks[slot, part])
            columns = slice(int(weights.bounds[part]), int(weights.bounds[part + 1]))
            hidden = down[slot, part, :rank] @ x[row].double() * float(weights.scales[slot, part])
            if weights.scaled[slot, part] and rank:
                factors[row, columns] = weights.factors[slot, columns].double()
            up = weights.part_of_up(slot, part)[:rank].double()
            out[row, columns] += factors[row, columns] * (hidden @ up)
    return torch.stack([out, factors], dim=1).float() if scaled else out.float()


def _step(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.bfloat16 else 1
