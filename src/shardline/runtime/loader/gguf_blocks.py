"""Decoders of the block types of GGUF, from rows of bytes to logical weights.

d and m are the scales of a block in float16. Numbers of fewer than 8 bits are packed low bits first: byte j of a run of
16 or 32 bytes has element j in its low four bits, and element j + 16 or j + 32 in its high four bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shardline.models.gguf.header import BlockType
from shardline.weights.grouped import CodeBits, GroupedWeight, TwoLevels

_PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def decode_plain(stored: Tensor, kind: BlockType) -> Tensor:
    """[N, bytes] uint8 of F32, F16 or BF16 -> [N, K]. It may be a view."""
    dtype = _PLAIN[kind.name]
    if stored.shape[-1] == 0 or stored.numel() == 0:
        return torch.empty(*stored.shape[:-1], stored.shape[-1] // dtype.itemsize, dtype=dtype)
    if stored.storage_offset() % dtype.itemsize or stored.data_ptr() % dtype.itemsize:
        stored = stored.clone()
    return stored.view(dtype)


def decode_blocks(stored: Tensor, kind: BlockType) -> GroupedWeight:
    """[N, bytes] uint8 of a packed type, whole blocks -> K columns of N rows."""
    num_rows = stored.shape[0]
    blocks = stored.reshape(num_rows, stored.shape[1] // kind.block_bytes, kind.block_bytes)
    return _DECODERS[kind.name](blocks)


def _half(blocks: Tensor, offset: int) -> Tensor:
    """[N, B] float16 at byte `offset` of each block."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n]: the low four bits of all bytes, then the high four bits."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _cut(values: Tensor, *sizes: int) -> Tensor:
    """The last dim as dims of `sizes`."""
    return values.reshape(*values.shape[:-1], *sizes)


def _high_bits(packed: Tensor) -> Tensor:
    """[N, B, 4] -> [N, B, 32]: bit i of the 32-bit number belongs to element i; it becomes 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((packed[..., None] >> shifts) & 1) << 4).flatten(-2)


def _weight(
    values: Tensor,
    scales: Tensor | TwoLevels,
    label: str,
    *,
    group: int = 32,
    bits: CodeBits = 4,
    zero: int | None = None,
    mins: Tensor | TwoLevels | None = None,
    table: Tensor | None = None,
) -> GroupedWeight:
    """`values` [N, B, ...] codes; `scales` and `mins` [N, ...], one for each group, or their levels."""
    num_rows = values.shape[0]
    scale_levels, min_levels = (part if isinstance(part, TwoLevels) else None for part in (scales, mins))
    scales = scales.multiply() if isinstance(scales, TwoLevels) else scales
    mins = mins.multiply() if isinstance(mins, TwoLevels) else mins
    values, scales = values.flatten(1).contiguous(), scales.flatten(1).contiguous()
    return GroupedWeight(
        values=values,
        scales=scales,
        group_of=torch.arange(values.shape[1]) // group,
        zeros=None if zero is None else torch.full((num_rows, scales.shape[1]), zero, dtype=torch.uint8),
        mins=None if mins is None else mins.flatten(1).contiguous(),
        table=table,
        bits=bits,
        label=label,
        scale_levels=scale_levels,
        min_levels=min_levels,
    )


def _q4_0(blocks: Tensor) -> GroupedWeight:
    return _weight(_nibbles(blocks[..., 2:]), _half(blocks, 0), "Q4_0", zero=8)


def _q4_1(blocks: Tensor) -> GroupedWeight:
    return _weight(_nibbles(blocks[..., 4:]), _half(blocks, 0), "Q4_1", mins=-_half(blocks, 2).float())


def _q5_0(blocks: Tensor) -> GroupedWeight:
    values = _nibbles(blocks[..., 6:]) | _high_bits(blocks[..., 2:6])
    return _weight(values, _half(blocks, 0), "Q5_0", bits=6, zero=16)


def _q5_1(blocks: Tensor) -> GroupedWeight:
    values = _nibbles(blocks[..., 8:]) | _high_bits(blocks[..., 4:8])
    return _weight(values, _half(blocks, 0), "Q5_1", bits=6, mins=-_half(blocks, 2).float())


def _q8_0(blocks: Tensor) -> GroupedWeight:
    return _weight(blocks[..., 2:] ^ 128, _half(blocks, 0), "Q8_0", bits=8, zero=128)


def _scales_and_mins(blocks: Tensor) -> tuple[TwoLevels, TwoLevels]:
    """Those of Q4_K and Q5_K: the scales and minimums of 8 groups, 6 bits each in 12 bytes, times d and times dmin."""
    packed = blocks[..., 4:16]
    low, mid, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=-1)
    mins = torch.cat((mid & 63, (high >> 4) | ((mid >> 6) << 4)), dim=-1)
    return _levels(scales, _half(blocks, 0)), _levels(mins, _half(blocks, 2))


def _levels(inner: Tensor, outer: Tensor) -> TwoLevels:
    """inner [N, B, groups of a block] and outer [N, B]."""
    return TwoLevels(inner.view(torch.int8).flatten(1), outer)


def _q4_k(blocks: Tensor) -> GroupedWeight:
    scales, mins = _scales_and_mins(blocks)
    values = _nibbles(_cut(blocks[..., 16:], 4, 32))
    return _weight(values, scales, "Q4_K", mins=mins)


def _q5_k(blocks: Tensor) -> GroupedWeight:
    scales, mins = _scales_and_mins(blocks)
    low = _nibbles(_cut(blocks[..., 48:], 4, 32)).flatten(-2)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((blocks[..., None, 16:48] >> shifts) & 1) << 4
    return _weight(low | high.flatten(-2), scales, "Q5_K", bits=6, mins=mins)


def _q6_k(blocks: Tensor) -> GroupedWeight:
    low = _nibbles(_cut(blocks[..., :128], 2, 64)).flatten(-2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = ((_cut(blocks[..., 128:192], 2, 1, 32) >> shifts) & 3) << 4
    scales = _levels(blocks[..., 192:208].contiguous(), _half(blocks, 208))
    return _weight(low | high.flatten(-3), scales, "Q6_K", group=16, bits=6, zero=32)


def _mxfp4(blocks: Tensor) -> GroupedWeight:
    # The table holds doubled values, so the scales are 2^(e - 128). The two smallest are no normal float32.
    exponent = blocks[..., 0].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    table = torch.tensor(_E2M1_DOUBLED, dtype=torch.float32)
    return _weight(_nibbles(blocks[..., 1:]), bits.view(torch.float32), "MXFP4", table=table)


_DECODERS: Mapping[str, Callable[[Tensor], GroupedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
