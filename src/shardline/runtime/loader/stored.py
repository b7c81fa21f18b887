"""Reads any part of a weight that a checkpoint stores quantized, as its layout says (`models/stored_layout.py`)."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from shardline.kernels.unpack import unpack_words
from shardline.models.partition import Span
from shardline.models.stored_layout import FLAT_NESTED_BLOCK, BlockLayout, Codes, Scales, StoredModule
from shardline.weights.grouped import GroupedWeight

ReadTensor = Callable[[str], Tensor | None]
"""A tensor of the module by the last part of its name, as the checkpoint stores it; None: it is not there."""

_FLAT_CODES = Codes("weight", "U8", 4, order=(1, 0))
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def read_stored(module: StoredModule, tensor: ReadTensor, rows: Span, columns: Span, label: str) -> GroupedWeight:
    """The part [rows, columns] of a quantized weight.

    Raises:
        ValueError: a number in the checkpoint is out of range. The message names the tensor.
    """
    if isinstance(module.layout, BlockLayout):
        return _read_blocks(module, module.layout, tensor, rows, columns, label)
    return _read_flat(module, tensor, rows, columns, label)


def is_grouped(module: StoredModule, tensor: ReadTensor) -> bool:
    """Whether each scale of a weight belongs to columns of one row, so that `read_stored` can read it."""
    return isinstance(module.layout, BlockLayout) or module.columns % _flat_block(module, tensor) == 0


def read_zeros(module: StoredModule, tensor: ReadTensor, rows: Span, columns: Span) -> Tensor | None:
    """The zero points of the part [rows, columns], [rows, G] uint8, as `read_stored` returns them.

    Raises:
        ValueError: as `read_stored`.
    """
    if not isinstance(module.layout, BlockLayout):
        return None
    return _read_zeros(
        module, module.layout, tensor, rows, _used(_groups_of_columns(module, module.layout, tensor, columns))
    )


def _read_blocks(
    module: StoredModule, layout: BlockLayout, tensor: ReadTensor, rows: Span, columns: Span, label: str
) -> GroupedWeight:
    _check_shape(module, layout, tensor)
    group_of = _groups_of_columns(module, layout, tensor, columns)
    used = _used(group_of)
    scales = _read_scales(module, layout.scales, tensor)[_blocks_of_rows(layout.scales, rows), used.start : used.stop]
    return GroupedWeight(
        values=read_codes(_there(tensor, layout.codes.part), layout.codes, rows, columns),
        scales=scales.contiguous(),
        group_of=group_of - used.start,
        zeros=_read_zeros(module, layout, tensor, rows, used),
        table=_table(layout.table),
        bits=4 if layout.codes.bits == 4 else 8,
        label=label,
        quantizes_input=layout.quantizes_input,
        input_scale=_input_scale(module, tensor) if layout.table == "e4m3" else 0.0,
        input_bound=layout.input_bound,
    )


def _used(group_of: Tensor) -> Span:
    """The groups from the first that columns belong to, to the last."""
    return Span(int(group_of.min()), int(group_of.max()) + 1) if len(group_of) else Span(0, 0)


def _read_zeros(
    module: StoredModule, layout: BlockLayout, tensor: ReadTensor, rows: Span, groups: Span
) -> Tensor | None:
    """[rows, groups] uint8. If all groups share a zero point, it is one number in memory."""
    if layout.zeros is None:
        return (
            torch.full((1, 1), layout.zero, dtype=torch.uint8).expand(rows.size, groups.size) if layout.zero else None
        )
    zeros = read_codes(_there(tensor, layout.zeros.part), layout.zeros, rows, groups)
    if layout.zeros.offset == 1 and layout.zeros.bits == 8 and bool((zeros == 0).any()):
        raise ValueError(f"{module.base}{layout.zeros.part} has a zero point of 256, which 8 bits cannot reach")
    return zeros


def _input_scale(module: StoredModule, tensor: ReadTensor) -> float:
    """The fixed scale of the module's input; 0: the checkpoint has none."""
    for part in ("input_scale", "activation_scale"):
        stored = tensor(part)
        if stored is not None and stored.numel() == 1:
            scale = float(stored.float())
            if not (math.isfinite(scale) and scale > 0):
                raise ValueError(f"{module.base}{part} is {scale}, and must be positive; download the checkpoint again")
            return scale
    return 0.0


def read_codes(stored: Tensor, codes: Codes, rows: Span, columns: Span) -> Tensor:
    """Part of a tensor of packed numbers: uint8 [rows, columns], contiguous."""
    if codes.block_columns:
        stored = stored.flatten(1)
    along_rows = codes.along == "rows"
    along, across = (rows, columns) if along_rows else (columns, rows)
    words = slice(along.start // codes.per_word, -(-along.stop // codes.per_word))
    lines = slice(across.start, across.stop)
    packed = stored[lines, words] if along_rows == codes.transposed else stored[words, lines]
    if codes.per_word == 1:
        numbers = packed.view(torch.uint8).T if codes.transposed else packed.view(torch.uint8)
        # The sum wraps: a signed byte plus 128 is unsigned.
        return (numbers + codes.offset if codes.offset else numbers).contiguous()
    unpacked = (words.stop - words.start) * codes.per_word, across.size
    numbers = torch.empty(unpacked if along_rows else unpacked[::-1], dtype=torch.uint8)
    if numbers.numel():
        unpack_words(packed, numbers, codes)
    before = along.start - words.start * codes.per_word
    own = slice(before, before + along.size)
    return (numbers[own] if along_rows else numbers[:, own]).contiguous()


def _groups_of_columns(module: StoredModule, layout: BlockLayout, tensor: ReadTensor, columns: Span) -> Tensor:
    """[columns] int64: the group of each column, counted from the weight's first."""
    num_groups = layout.scales.num_groups(module.columns)
    in_order = torch.arange(module.columns) // (layout.scales.block_columns or module.columns)
    index = tensor(layout.group_index) if layout.group_index else None
    # compressed-tensors writes -1 everywhere if columns were not sorted.
    if index is None or bool((index == -1).all()):
        return in_order[columns.start : columns.stop]
    if bool((index < 0).any()) or bool((index >= num_groups).any()):
        raise ValueError(
            f"{module.base}{layout.group_index} names groups outside of 0 to {num_groups - 1}; download the checkpoint "
            "again"
        )
    if layout.ordered and not torch.equal(index.long(), in_order):
        raise ValueError(
            f"{module.base}{layout.group_index} puts columns into groups out of order, but config.json does not say so "
            "(desc_act, actorder); correct it"
        )
    return index[columns.start : columns.stop].long()


def _blocks_of_rows(scales: Scales, rows: Span) -> Tensor:
    """[rows] int64: the block of each row."""
    if not scales.block_rows:
        return torch.zeros(rows.size, dtype=torch.int64)
    return torch.arange(rows.start, rows.stop) // scales.block_rows


def _read_scales(module: StoredModule, scales: Scales, tensor: ReadTensor) -> Tensor:
    """The scales of all blocks, [blocks of rows, blocks of columns]."""
    stored = _there(tensor, scales.part)
    grid = scales.grid(module.rows, module.columns)
    stored = stored.reshape(grid[::-1]).T if scales.transposed else stored.reshape(grid)
    if stored.dtype == torch.uint8:
        stored = stored.contiguous().view(torch.float8_e8m0fnu)
    found = stored if stored.dtype in (torch.float16, torch.bfloat16) else stored.float()
    if scales.divisor:
        found = found.float() / _there(tensor, scales.divisor).float().reshape(())
    if scales.multiplier:
        found = found.float() * _there(tensor, scales.multiplier).float().reshape(())
    if scales.factor != 1.0:
        found = found.float() * scales.factor
    if not bool(torch.isfinite(found).all()):
        raise ValueError(f"{module.base}{scales.part} holds NaN or Inf; download the checkpoint again")
    return found


@functools.cache
def _table(name: str) -> Tensor | None:
    """What each code stands for, in float32; None: for itself."""
    if name == "e4m3":
        return torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    if name == "e2m1":
        return torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    return None


def _check_shape(module: StoredModule, layout: BlockLayout, tensor: ReadTensor) -> None:
    if layout.weight_shape:
        stated = _there(tensor, layout.weight_shape).tolist()
        if stated != [module.rows, module.columns]:
            raise ValueError(
                f"{module.base}{layout.weight_shape} states {stated}, but the weight is {[module.rows, module.columns]}"
            )


def _read_flat(module: StoredModule, tensor: ReadTensor, rows: Span, columns: Span, label: str) -> GroupedWeight:
    """Part of a weight of bitsandbytes whose blocks do not cross rows."""
    block = _flat_block(module, tensor)
    assert module.columns % block == 0, "blocks cross rows"
    groups = module.columns // block
    scales = _flat_scales(module, tensor, Span(rows.start * groups, rows.stop * groups)).view(rows.size, groups)
    used = slice(columns.start // block, -(-columns.stop // block))
    values = _flat_codes(module, tensor, Span(rows.start * module.columns, rows.stop * module.columns))
    return GroupedWeight(
        values=values.view(rows.size, module.columns)[:, columns.start : columns.stop].contiguous(),
        scales=scales[:, used].contiguous(),
        group_of=torch.arange(columns.start, columns.stop) // block - used.start,
        table=_flat_table(module, tensor),
        label=label,
    )


def read_flat_dense(module: StoredModule, tensor: ReadTensor, rows: Span, columns: Span) -> Tensor:
    """Part of a weight of bitsandbytes whose blocks may cross rows, in float32."""
    elements = Span(rows.start * module.columns, rows.stop * module.columns)
    block = _flat_block(module, tensor)
    blocks = Span(elements.start // block, -(-elements.stop // block))
    scales = _flat_scales(module, tensor, blocks)
    block_of = torch.arange(elements.start, elements.stop) // block - blocks.start
    values = _flat_table(module, tensor)[_flat_codes(module, tensor, elements).int()] * scales[block_of]
    return values.view(rows.size, module.columns)[:, columns.start : columns.stop]


def _flat_codes(module: StoredModule, tensor: ReadTensor, elements: Span) -> Tensor:
    """The codes of some neighbours in the flattened weight, uint8. The high bits of a byte hold the first of two."""
    stored = _there(tensor, "weight").reshape(-1)[elements.start // 2 : -(-elements.stop // 2)]
    numbers = torch.empty(1, 2 * len(stored), dtype=torch.uint8)
    unpack_words(stored[None], numbers, _FLAT_CODES)
    return numbers[0, elements.start % 2 :][: elements.size]


def _flat_scales(module: StoredModule, tensor: ReadTensor, blocks: Span) -> Tensor:
    """The scales of some blocks, float32."""
    stored = _there(tensor, "weight.absmax").reshape(-1)[blocks.start : blocks.stop]
    if stored.dtype == torch.uint8:
        codes, scales = _there(tensor, "weight.nested_quant_map"), _there(tensor, "weight.nested_absmax")
        offset = torch.tensor(float(_flat_state(module, tensor)["nested_offset"]))
        block_of = torch.arange(blocks.start, blocks.stop) // FLAT_NESTED_BLOCK
        stored = codes[stored.int()] * scales[block_of] + offset
    if not bool(torch.isfinite(stored).all()):
        raise ValueError(f"{module.base}weight.absmax holds NaN or Inf; download the checkpoint again")
    return stored


def _flat_table(module: StoredModule, tensor: ReadTensor) -> Tensor:
    table = _there(tensor, "weight.quant_map").clone()
    if not bool(torch.isfinite(table).all()):
        raise ValueError(f"{module.base}weight.quant_map holds NaN or Inf; download the checkpoint again")
    return table


def _flat_block(module: StoredModule, tensor: ReadTensor) -> int:
    """Neighbours that share a scale."""
    return cast("int", _flat_state(module, tensor)["blocksize"])


def _flat_state(module: StoredModule, tensor: ReadTensor) -> dict[str, Any]:
    """What the JSON beside a weight of bitsandbytes says, checked against the tensors.

    Raises:
        ValueError: it does not fit them.
    """
    kind = next(kind for kind in ("nf4", "fp4") if tensor(f"weight.quant_state.bitsandbytes__{kind}") is not None)
    name = f"{module.base}weight.quant_state.bitsandbytes__{kind}"
    stored = _there(tensor, f"weight.quant_state.bitsandbytes__{kind}")
    try:
        state = json.loads(bytes(stored.tolist()))
        shape, block = list(state["shape"]), state["blocksize"]
        num_blocks = -(-math.prod(shape) // block)
        fits = shape == [module.rows, module.columns] and isinstance(block, int) and block > 0
        fits = fits and num_blocks == _there(tensor, "weight.absmax").numel()
        if _there(tensor, "weight.absmax").dtype == torch.uint8:
            fits = fits and state["nested_blocksize"] == FLAT_NESTED_BLOCK
            fits = fits and math.isfinite(float(state["nested_offset"]))
    except (ValueError, KeyError, TypeError, RecursionError, ZeroDivisionError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(f"{name} does not describe {module.base}weight; download the checkpoint again")
    return cast("dict[str, Any]", state)


def _there(tensor: ReadTensor, part: str) -> Tensor:
    found = tensor(part)
    assert found is not None, f"{part} passed the check, but is not there"
    return found
