"""Decoders of the block types of GGUF, from rows of bytes to logical weights.

A kernel unpacks the codes of weights, and the 6- and 8-bit scales of groups. d and m are the scales of a block, in
float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardline.checkpoints.gguf.header import BLOCK_TYPES, BlockType
from shardline.kernels.unpack import unpack_blocks
from shardline.weights.grouped import CodeBits, GroupedWeight, TwoLevels

_PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_NUMBERS: Mapping[str, int] = {kind.name: number for number, kind in BLOCK_TYPES.items()}


def decode_plain(stored: Tensor, kind: BlockType) -> Tensor:
    """[N, bytes] uint8 of F32, F16 or BF16 -> [N, K]. It may be a view."""
    dtype = _PLAIN[kind.name]
    if stored.shape[-1] == 0 or stored.numel() == 0:
        return torch.empty(*stored.shape[:-1], stored.shape[-1] // dtype.itemsize, dtype=dtype)
    if stored.storage_offset() % dtype.itemsize or stored.data_ptr() % dtype.itemsize:
        stored = stored.clone()
    return stored.view(dtype)


def kind_number(kind: BlockType) -> int:
    """The number that GGUF has for a packed type."""
    return _NUMBERS[kind.name]


def decode_blocks(stored: Tensor, kind: BlockType) -> GroupedWeight:
    """[N, bytes] uint8 of a packed type, whole blocks -> K columns of N rows."""
    form, num_rows = _FORMS[kind.name], stored.shape[0]
    num_blocks = stored.shape[1] // kind.block_bytes
    num_elements = num_blocks * kind.block_elements
    codes = torch.empty(num_rows, num_elements, dtype=torch.uint8)
    scales, mins = (
        torch.empty(num_rows, num_elements // form.group, dtype=torch.int8) if there else None
        for there in (form.has_levels, form.has_levels and form.mins is not None)
    )
    if codes.numel():
        unpack_blocks(stored, kind_number(kind), codes, scales, mins)
    blocks = stored.view(num_rows, num_blocks, kind.block_bytes)
    outer = _exponents(blocks[..., 0]) if form.scale is None else _half(blocks, form.scale)
    outer_mins = None if form.mins is None else _half(blocks, form.mins)
    scale_levels = None if scales is None else TwoLevels(scales, outer)
    min_levels = None if mins is None or outer_mins is None else TwoLevels(mins, outer_mins)
    all_mins = None if outer_mins is None else -outer_mins.float()
    return GroupedWeight(
        values=codes,
        scales=outer if scale_levels is None else scale_levels.multiply(),
        group_of=torch.arange(num_elements) // form.group,
        zeros=None if form.zero is None else _repeated(form.zero, num_rows, num_elements // form.group),
        mins=all_mins if min_levels is None else min_levels.multiply(),
        table=torch.tensor(_E2M1_DOUBLED, dtype=torch.float32) if form.scale is None else None,
        bits=form.bits,
        label=kind.name,
        scale_levels=scale_levels,
        min_levels=min_levels,
    )


class _Form(NamedTuple):
    """What the bytes of a block mean."""

    bits: CodeBits
    """Bits of a code in memory."""
    scale: int | None
    """The byte where d begins; None: byte 0 is an exponent, and codes are e2m1."""
    mins: int | None = None
    """The byte where m begins."""
    zero: int | None = None
    """The code that stands for zero."""
    group: int = 32
    has_levels: bool = False
    """Whether groups have small scales, and mins if there is m, that are multiplied by those of the block. A small min
    is subtracted, and other mins are added."""


_FORMS: Mapping[str, _Form] = {
    "Q4_0": _Form(4, 0, zero=8),
    "Q4_1": _Form(4, 0, 2),
    "Q5_0": _Form(6, 0, zero=16),
    "Q5_1": _Form(6, 0, 2),
    "Q8_0": _Form(8, 0, zero=128),
    "Q4_K": _Form(4, 0, 2, has_levels=True),
    "Q5_K": _Form(6, 0, 2, has_levels=True),
    "Q6_K": _Form(6, 208, zero=32, group=16, has_levels=True),
    "MXFP4": _Form(4, None),
}


def _half(blocks: Tensor, offset: int) -> Tensor:
    """[N, B] float16 at byte `offset` of each block."""
    pair = blocks[..., offset : offset + 2]
    if pair.data_ptr() % 2 or pair.storage_offset() % 2 or any(stride % 2 for stride in pair.stride()[:-1]):
        pair = pair.contiguous()
    return pair.view(torch.float16)[..., 0].contiguous()


def _repeated(zero: int, *shape: int) -> Tensor:
    """One number in memory for all groups."""
    return torch.full((1, 1), zero, dtype=torch.uint8).expand(shape)


def _exponents(stored: Tensor) -> Tensor:
    """[N, B] float32: 2^(e - 128), since the table holds doubled values. The two smallest are no normal numbers."""
    exponent = stored.int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return bits.view(torch.float32)
