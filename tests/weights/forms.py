"""Weights in each form that packed checkpoints decode to, quantized here row by row from dense ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardline.kernels.host.grouped import GroupedPanels
from shardline.weights.grouped import CodeBits, GroupedWeight, TwoLevels

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


class Form(NamedTuple):
    """How a weight is quantized."""

    group_size: int
    """0: the whole row."""
    bits: CodeBits = 4
    levels: int = 16
    """Number of codes in use."""
    zero: int | None = None
    """The zero point of all groups, if they share one."""
    zeros: bool = False
    """Whether groups have zero points of their own."""
    mins: bool = False
    table: Tensor | None = None
    scale_dtype: torch.dtype = torch.float32
    shuffled: bool = False
    """Whether the columns of a group are scattered over the row."""
    outer: int = 0
    """Groups that share an outer scale, at most; 0: scales have one level."""


FORMS = {
    "q4_0": Form(32, zero=8, scale_dtype=torch.float16),
    "q4_k": Form(32, mins=True, outer=8),
    "awq": Form(64, zeros=True, scale_dtype=torch.float16),
    "act_order": Form(32, zeros=True, scale_dtype=torch.bfloat16, shuffled=True),
    "mxfp4": Form(32, table=E2M1, scale_dtype=torch.bfloat16),
    "nf4": Form(64, table=NF4),
    "fp8": Form(0, bits=8, table=E4M3),
    "fp8_block": Form(128, bits=8, table=E4M3),
    "q8_0": Form(32, bits=8, levels=256, zero=128, scale_dtype=torch.float16),
    "gptq8": Form(64, bits=8, levels=256, zeros=True, scale_dtype=torch.float16),
    "q6_k": Form(16, bits=6, levels=64, zero=32, outer=16),
    "q5_k": Form(32, bits=6, levels=32, mins=True),
}


def quantize(dense: Tensor, name: str) -> GroupedWeight:
    """The weight [N, K] in a form. A row's codes depend only on this row."""
    form, (num_rows, num_columns) = FORMS[name], dense.shape
    weight, size = dense.float(), form.group_size or num_columns
    places = torch.arange(num_columns)
    # 7 has no common divisor with the sizes here.
    group_of = (places * 7 % num_columns if form.shuffled else places) // size
    index = group_of.expand(num_rows, -1)
    start = torch.zeros(num_rows, int(group_of.max()) + 1)
    low = start.scatter_reduce(1, index, weight, "amin")
    high = start.scatter_reduce(1, index, weight, "amax")
    zeros = mins = None
    scale_levels = min_levels = None
    if form.table is not None:
        largest = form.table.nan_to_num().abs().max()
        scales = (torch.maximum(high, -low) / largest).to(form.scale_dtype)
        codes = _nearest(weight / scales.float()[:, group_of].clamp_min(1e-9), form.table)
    else:
        top = form.levels - 1
        reach = high - low if form.zero is None else torch.maximum(high, -low) / (top - form.zero) * top
        scales = (reach / top).to(form.scale_dtype)
        if form.outer:
            scale_levels = _two_levels(scales, form.outer)
            scales = scale_levels.multiply()
        steps = scales.float().clamp_min(1e-9)
        if form.mins:
            min_levels = _two_levels(-low, form.outer) if form.outer else None
            mins = -low if min_levels is None else min_levels.multiply()
            codes = ((weight + mins[:, group_of]) / steps[:, group_of]).round()
        else:
            offsets = (-low / steps).round() if form.zeros else torch.full_like(low, float(form.zero or 0))
            zeros = offsets.clamp(0, top).to(torch.uint8)
            codes = (weight / steps[:, group_of] + zeros.float()[:, group_of]).round()
        codes = codes.clamp(0, top)
    return GroupedWeight(
        codes.to(torch.uint8),
        scales,
        group_of,
        zeros,
        mins,
        form.table,
        form.bits,
        name,
        scale_levels,
        min_levels,
    )


def assert_same_panels(one: GroupedPanels, other: GroupedPanels) -> None:
    """Two packed weights are equal, bit by bit."""
    for mine, theirs in zip(vars(one).values(), vars(other).values(), strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert mine == theirs


def _two_levels(numbers: Tensor, most: int) -> TwoLevels:
    """The nearest to numbers [N, G], with as many groups in an outer one as divide G."""
    count = most
    while numbers.shape[1] % count:
        count //= 2
    outer = (numbers.abs().unflatten(1, (-1, count)).amax(2) / 127).clamp_min(1e-6).half()
    inner = (numbers / outer.float().repeat_interleave(count, 1)).round().clamp(-127, 127)
    return TwoLevels(inner.to(torch.int8), outer)


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    order = table.nan_to_num(torch.inf).argsort()
    ascending = table[order].nan_to_num(torch.inf)
    middles = (ascending[1:] + ascending[:-1]) / 2
    places = torch.bucketize(values, middles)
    last = len(table) - 1 - int(table.isnan().sum())
    return order[places.clamp_max(last)]
