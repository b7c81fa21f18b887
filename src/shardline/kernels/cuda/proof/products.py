"""Trials of products: with one weight, and with those of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.proof.check import MakeTrials, Memory, Outputs, Sizes, Trial, Trials, product
from shardline.kernels.cuda.proof.rows import with_extremes
from shardline.kernels.cuda.w4a16 import pack_w4a16
from shardline.weights.base import FormatChoice
from shardline.weights.grouped import GroupedWeight

_ROWS = 300
"""More than a tile of many rows has; single rows, 27 and 70 have tiles of their own."""

_PLACES = ((0, 1), (5, 7), (40, 67), (0, 70), (126, 130))

_COLUMNS = 144

_RAGGED = 77
"""Columns of an output: not a multiple of a tile, or not even of 16."""


def _shapes(dtype: torch.dtype, gate: str) -> list[tuple[int, int, torch.dtype]]:
    """Rows, columns and dtype of the outputs of products."""
    shapes = [(_ROWS, _COLUMNS, dtype), (70, _RAGGED, torch.float32)]
    return [(70, _COLUMNS, dtype)] if gate else shapes


def linear(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    depth, gate = sizes["depth"], sizes["gate"]
    for rows, columns, out_dtype in _shapes(dtype, gate):
        x = memory.numbers(rows, depth + 16, dtype=dtype)[:, 16:]
        weight = memory.numbers(2 * columns if gate else columns, depth, dtype=dtype)
        bias = memory.numbers(len(weight), dtype=dtype)

        def call(kernels: Any, x: Tensor, out: Tensor, weight: Tensor = weight, bias: Tensor = bias) -> None:
            kernels.linear(x, weight, bias, out, gate or None)

        yield Trial(product(memory, x, columns, out_dtype, call), [place for place in _PLACES if place[1] <= rows])


def scaled(name: str) -> MakeTrials:
    """Products of int8 and int4 weights."""

    def trials(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
        depth, gate = sizes["depth"], sizes["gate"]
        for rows, columns, out_dtype in _shapes(dtype, gate):
            x = own.quantized_empty(rows, depth, dtype)
            own.stand_ins.quantize_rows(memory.numbers(rows, depth, dtype=dtype), *x[:3])
            values, scales, sums = memory.place(x.values), memory.place(x.scales), x.sums
            packed = getattr(own, f"{name}_empty")(columns, depth, gated=bool(gate))
            for half in (0, 1) if gate else (None,):
                getattr(own, f"pack_{name}")(memory.numbers(columns, depth, dtype=dtype), *packed, 0, half)
            panels, column_scales = (memory.place(part) for part in packed)
            bias = memory.numbers(len(column_scales), dtype=dtype)

            def compute(
                kernels: Any,
                some: slice,
                held: tuple[Tensor, ...] = (values, scales, sums, panels, column_scales, bias),
                columns: int = columns,
                out_dtype: torch.dtype = out_dtype,
            ) -> Outputs:
                values, scales, sums, panels, column_scales, bias = held
                out = memory.empty(len(values[some]), columns, dtype=out_dtype)
                rows = (values[some], scales[some], sums[some], depth)
                getattr(kernels, f"linear_{name}")(*rows, panels, column_scales, bias, out, gate or None)
                return (out,)

            yield Trial(compute, [place for place in _PLACES if place[1] <= rows])

    return trials


def fp8(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    depth, gate = sizes["depth"], sizes["gate"]
    for rows, columns, out_dtype in _shapes(dtype, gate):
        packed = own.fp8_empty(columns, depth, gated=bool(gate))
        for half in (0, 1) if gate else (None,):
            own.pack_fp8(memory.numbers(columns, depth, dtype=dtype), *packed, 0, half)
        values, scales = (memory.place(part) for part in packed)

        def call(kernels: Any, x: Tensor, out: Tensor, values: Tensor = values, scales: Tensor = scales) -> None:
            kernels.linear_fp8(x, values, scales, None, out, gate or None)

        x = with_extremes(memory.numbers(rows, depth + 16, dtype=dtype)[:, 16:])
        yield Trial(product(memory, x, columns, out_dtype, call), [place for place in _PLACES if place[1] <= rows])


def w4a16(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    depth = sizes["depth"]
    group = sizes["group"] or depth
    groups = -(-depth // group)
    weight = pack_w4a16(
        [
            GroupedWeight(
                memory.below(16, _COLUMNS, depth, dtype=torch.uint8),
                memory.numbers(_COLUMNS, groups, dtype=torch.float16),
                torch.arange(depth, device=memory.device) // group,
                memory.below(16, _COLUMNS, groups, dtype=torch.uint8),
            )
        ]
    )
    values, scales, zeros = map(memory.place, (weight.values, weight.scales, weight.zeros))

    def call(kernels: Any, x: Tensor, out: Tensor) -> None:
        kernels.linear_w4a16(x, values, scales, zeros, weight.group_size, None, out)

    yield Trial(product(memory, memory.numbers(_ROWS, depth, dtype=dtype), _COLUMNS, dtype, call), _PLACES)


def linear_heads(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    depth, columns, heads = sizes["depth"], sizes["columns"], 3
    x = memory.numbers(70, heads, depth + 16, dtype=dtype)[..., 16:]
    weight = memory.numbers(heads, columns, depth, dtype=dtype)

    def compute(kernels: Any, rows: slice) -> Outputs:
        out = memory.empty(len(x[rows]), heads, columns, dtype=dtype)
        kernels.linear_heads(x[rows], weight, out)
        return (out,)

    yield Trial(compute, [(0, 1), (5, 7), (62, 66)])


def experts(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    """Both products and the sum over slots; experts of other ranks are left out."""
    depth, inner, gated, held = sizes["depth"], sizes["inner"], sizes["gated"], sizes["held"]
    num_experts, first, chosen, count = 3, 1, 2, 101
    up, down = (
        _packed_experts(memory, own, held, num_experts, *shape, dtype)
        for shape in ((2 * inner if gated else inner, depth), (depth, inner))
    )
    x, shared = (memory.numbers(count, depth, dtype=dtype) for _ in range(2))
    ids = memory.place(torch.stack([memory.order(5)[:chosen] for _ in range(count)]).int())
    weights = memory.place(torch.rand(count, chosen, generator=torch.Generator().manual_seed(2)))
    scale = memory.place(torch.rand(count, generator=torch.Generator().manual_seed(3)))

    def activated(kernels: Any, x: Tensor, ids: Tensor, *, first: int, compact: bool) -> Tensor:
        out = memory.empty(ids.numel(), inner, dtype=dtype)
        kernels.expert_up(x, ids, first, compact, *up, sizes["activation"], gated, out, None)
        return out

    def whole(kernels: Any, rows: slice) -> Outputs:
        hidden = activated(kernels, x[rows], ids[rows], first=first, compact=False)
        out = memory.empty(len(x[rows]), depth, dtype=dtype)
        kernels.expert_down(hidden, ids[rows], weights[rows], first, *down, shared[rows], scale[rows], out, None)
        return (out,)

    yield Trial(whole, ((0, 1), (5, 7), (60, 101)))
    all_here = memory.place(ids % num_experts)
    bounds = torch.tensor([0, num_experts])

    def together(kernels: Any, rows: slice) -> Outputs:
        hidden = activated(kernels, x[rows], all_here[rows], first=0, compact=False)
        out = memory.empty(len(x[rows]), depth, dtype=dtype)
        kernels.expert_down(hidden, all_here[rows], weights[rows], 0, *down, None, None, out, None)
        return (out,)

    def exchanged() -> Outputs:
        hidden = activated(own, x, all_here, first=0, compact=True)
        rows = memory.empty(all_here.numel(), depth, dtype=dtype)
        own.expert_slots(hidden, all_here, 0, *down, rows, None)
        out = memory.empty(count, depth, dtype=dtype)
        own.combine_slots(rows, all_here, weights, memory.place(bounds), None, None, out)
        return (out,)

    yield Trial(together, (), exchanged)


def _packed_experts(
    memory: Memory, own: CudaKernels, held: str, count: int, rows: int, depth: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    format = FormatChoice(held).open_format()
    packed = format.allocate_experts(own, count, memory.numbers(rows, depth, dtype=dtype))
    for index in range(count):
        format.pack_expert(own, packed, index, memory.numbers(rows, depth, dtype=dtype))
    assert packed.scales is None or isinstance(packed.scales, Tensor)
    return memory.place(packed.panels), None if packed.scales is None else memory.place(packed.scales)
