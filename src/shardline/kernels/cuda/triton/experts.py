"""The linears of many experts at once, on the GPU: one grouped product over slots sorted by expert.

A slot (one expert chosen by one token) keeps its place; only an index is sorted. A program computes rows of one expert,
so a row has the same bits as in a linear with that expert's weight alone (see `gemm`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.activation import activation as activate_rows
from shardline.kernels.cuda.triton.gemm import computes_pairs, gated_product, gemm_options, tile_for, tile_of_program
from shardline.kernels.cuda.triton.launch import EXACT, begin_early
from shardline.kernels.cuda.triton.quantize import quantize_rows, quantize_rows_fp8

_SORT_BLOCK = 1024
_COMBINE_BLOCK = 1024


class SortedSlots(NamedTuple):
    """Slots sorted by expert, in tiles of rows; each tile has one expert."""

    slots: Tensor
    """[tiles, rows of a tile] int32; -1 after an expert's last slot. Tiles without an expert are not written."""
    experts: Tensor
    """[tiles] int32: each tile's expert, counted from the rank's first; -1: the tile has no rows."""


def expert_up(
    x: Tensor,
    ids: Tensor,
    first_expert: int,
    compact: bool,
    panels: Tensor,
    scales: Tensor | tuple[object, ...] | None,
    name: str,
    gated: bool,
    out: Tensor,
    bias: Tensor | None = None,
) -> None:
    """As `ops.moe.experts.expert_up`, into out [T * k, I]: row t * k + j is slot j of token t. Rows are undefined if
    another rank holds the slot's expert."""
    assert bias is None, "see deployment.gpu_support"
    if compact:
        ids = tokens_here_first(ids, first_expert, panels.shape[0])
    if gated:
        grouped_linear(x, ids, first_expert, panels, scales, ids.shape[1], out, gate=name)
    else:
        products = torch.empty_like(out)
        grouped_linear(x, ids, first_expert, panels, scales, ids.shape[1], products)
        activate_rows(products, out, name, False)


def expert_down(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first_expert: int,
    panels: Tensor,
    scales: Tensor | tuple[object, ...] | None,
    shared: Tensor | None,
    shared_scale: Tensor | None,
    out: Tensor,
    bias: Tensor | None = None,
) -> None:
    """As `ops.moe.experts.expert_down`, into out [T, N]; x is the output of `expert_up`."""
    assert bias is None, "see deployment.gpu_support"
    products = torch.empty(ids.numel(), out.shape[1], dtype=out.dtype, device=x.device)
    grouped_linear(x, ids, first_expert, panels, scales, 1, products)
    add_slots(products, ids, weights, first_expert, first_expert + panels.shape[0], shared, shared_scale, out)


def add_slots(
    products: Tensor,
    ids: Tensor,
    weights: Tensor,
    first_expert: int,
    end_expert: int,
    shared: Tensor | None,
    shared_scale: Tensor | None,
    out: Tensor,
) -> None:
    """The sum at the end of `expert_down`, over products [T * k, N] in the order of slots."""
    num_tokens, width = out.shape
    if num_tokens > 0:
        _combine_kernel[(triton.cdiv(width, _COMBINE_BLOCK), num_tokens)](
            products,
            ids,
            weights,
            shared,
            shared_scale,
            out,
            first_expert,
            end_expert,
            width,
            0 if shared is None else shared.stride(0),
            CHOSEN=ids.shape[1],
            BLOCK=_COMBINE_BLOCK,
            **EXACT,
        )


def is_here(ids: Tensor, first_expert: int, num_experts: int) -> Tensor:
    """Which slots chose one of these experts."""
    return (ids >= first_expert) & (ids < first_expert + num_experts)


def first_where(condition: Tensor) -> Tensor:
    """Indices of the true elements, in order, then of the false ones; the host need not wait for their number."""
    return torch.argsort((~condition).to(torch.uint8), stable=True)


def tokens_here_first(ids: Tensor, first_expert: int, num_experts: int) -> Tensor:
    """ids [T, k], reordered: the tokens that chose one of these experts come first, as `pack_dispatch` sends them."""
    return ids[first_where(is_here(ids, first_expert, num_experts).any(1))]


def sort_slots(ids: Tensor, first_expert: int, num_experts: int, tile_rows: int) -> SortedSlots:
    """The slots of ids [T, k] that chose one of `num_experts` experts."""
    num_slots = ids.numel()
    num_tiles = num_slots // tile_rows + min(num_experts, num_slots)
    slots = torch.empty(num_tiles, tile_rows, dtype=torch.int32, device=ids.device)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=ids.device)
    _sort_kernel[(num_experts,)](
        ids,
        slots,
        experts,
        num_slots,
        num_tiles,
        first_expert,
        NUM_EXPERTS=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        TILE_ROWS=tile_rows,
        BLOCK=min(_SORT_BLOCK, triton.next_power_of_2(num_slots)),
        num_warps=4,
    )
    return SortedSlots(slots, experts)


def grouped_linear(
    x: Tensor,
    ids: Tensor,
    first_expert: int,
    panels: Tensor,
    scales: Tensor | tuple[object, ...] | None,
    slots_per_row: int,
    out: Tensor,
    *,
    gate: str | None = None,
) -> None:
    """out [T * k, N]: row s is row s // slots_per_row of x times the weight of the slot's expert. If `gate` names an
    activation, experts have 2 * N rows, see `gemm.gated_product`."""
    assert not isinstance(scales, tuple), "GPUs keep no experts packed"
    num_slots, num_columns = out.shape
    if num_slots == 0:
        return
    x, row_scales = _as_weights_are(x, panels.dtype)
    # The tile of one linear with the rows of an average expert.
    rows = num_slots // panels.shape[0]
    in_pairs = computes_pairs(rows, x.dtype, gate, is_scaled=row_scales is not None)
    tile = tile_for(rows, num_columns, x.dtype, in_pairs=in_pairs)
    by_expert = sort_slots(ids, first_expert, panels.shape[0], tile.rows)
    num_tiles = len(by_expert.experts)
    _grouped_kernel[(num_tiles * triton.cdiv(num_columns, tile.columns),)](
        x,
        row_scales,
        panels,
        scales,
        by_expert.slots,
        by_expert.experts,
        out,
        num_tiles,
        num_columns,
        x.shape[1],
        x.stride(0),
        panels.stride(0),
        0 if scales is None else scales.stride(0),
        SLOTS_PER_ROW=slots_per_row,
        GATE=gate,
        **gemm_options(x, panels, tile, in_pairs=in_pairs),
    )


def _as_weights_are(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The rows x in the form that weights of `dtype` need, and their scales."""
    if dtype == x.dtype:
        return x, None
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if dtype == torch.float8_e4m3fn:
        values = torch.empty(x.shape, dtype=dtype, device=x.device)
        quantize_rows_fp8(x, values, scales)
    else:
        values = torch.empty(x.shape[0], -(-x.shape[1] // 32) * 32, dtype=torch.int8, device=x.device)
        quantize_rows(x, values, scales, None)
    return values, scales


@triton.jit(do_not_specialize=["num_slots", "num_tiles", "first_expert"])
def _sort_kernel(
    ids_ptr,
    slots_ptr,
    experts_ptr,
    num_slots,
    num_tiles,
    first_expert,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program counts the slots of all experts, to find where its own expert's slots begin, and then places
    these."""
    own = tl.program_id(0)
    lane, expert = tl.arange(0, BLOCK), tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for begin in range(0, num_slots, BLOCK):
        chosen = tl.load(ids_ptr + begin + lane, mask=begin + lane < num_slots, other=-1) - first_expert
        is_here = (chosen >= 0) & (chosen < NUM_EXPERTS) & (begin + lane < num_slots)
        counts += tl.histogram(tl.where(is_here, chosen, NUM_EXPERTS), BINS)
    tiles = tl.where(expert < NUM_EXPERTS, (counts + TILE_ROWS - 1) // TILE_ROWS, 0)
    first_tile = tl.sum(tl.where(expert < own, tiles, 0), axis=0)
    end_tile = first_tile + tl.sum(tl.where(expert == own, tiles, 0), axis=0)
    for tile in range(first_tile, end_tile):
        tl.store(experts_ptr + tile, own)
    if own == NUM_EXPERTS - 1:
        for tile in range(end_tile, num_tiles):
            tl.store(experts_ptr + tile, -1)
    place = first_tile * TILE_ROWS
    for begin in range(0, num_slots, BLOCK):
        chosen = tl.load(ids_ptr + begin + lane, mask=begin + lane < num_slots, other=-1) - first_expert
        is_mine = ((chosen == own) & (begin + lane < num_slots)).to(tl.int32)
        tl.store(slots_ptr + place + tl.cumsum(is_mine, axis=0) - 1, begin + lane, mask=is_mine != 0)
        place += tl.sum(is_mine, axis=0)
    behind = place + tl.arange(0, TILE_ROWS)
    tl.store(slots_ptr + behind, -1, mask=behind < end_tile * TILE_ROWS)


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_kernel(
    x_ptr,
    row_scales_ptr,
    weight_ptr,
    column_scales_ptr,
    slots_ptr,
    experts_ptr,
    out_ptr,
    num_tiles,
    num_columns,
    depth,
    x_stride,
    expert_stride,
    scales_stride,
    SLOTS_PER_ROW: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_WHOLE_K: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    begin_early(IS_EARLY)
    tile, column_tile = tile_of_program(tl.program_id(0), num_tiles, tl.cdiv(num_columns, BLOCK_N))
    expert = tl.load(experts_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    slot = tl.load(slots_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_ptr += expert * expert_stride
    if column_scales_ptr is not None:
        column_scales_ptr += expert * scales_stride
    total = gated_product(
        x_ptr, row_scales_ptr, weight_ptr, column_scales_ptr, None, out_ptr.dtype.element_ty,
        tl.maximum(slot, 0) // SLOTS_PER_ROW, slot >= 0, column, num_columns, depth, x_stride, GATE,
        BLOCK_M, BLOCK_N, BLOCK_K, IS_WHOLE_K,
    )  # fmt: skip
    place = out_ptr + slot.to(tl.int64)[:, None] * num_columns + column[None, :]
    inside = (slot[:, None] >= 0) & (column[None, :] < num_columns)
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _combine_kernel(
    products_ptr,
    ids_ptr,
    weights_ptr,
    shared_ptr,
    shared_scale_ptr,
    out_ptr,
    first_expert,
    end_expert,
    width,
    shared_stride,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds a token's slots in order, in fp32, then the shared block's output, and rounds once."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(CHOSEN):
        place = token * CHOSEN + slot
        expert = tl.load(ids_ptr + place)
        if (expert >= first_expert) & (expert < end_expert):
            row = tl.load(products_ptr + place * width + column, mask=inside, other=0.0).to(tl.float32)
            total = tl.fma(tl.zeros_like(row) + tl.load(weights_ptr + place), row, total)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * shared_stride + column, mask=inside, other=0.0).to(tl.float32)
        if shared_scale_ptr is not None:
            total = tl.fma(tl.zeros_like(shared) + tl.load(shared_scale_ptr + token), shared, total)
        else:
            total += shared
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)
