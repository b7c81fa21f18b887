"""Copies of KV blocks between pages and plain host memory, with a checksum over their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardline import _cpu


def copy_block_out(pages: Sequence[Tensor], block: int, slot: Tensor) -> int:
    """Copy a block of each of the tensors [num_blocks, ...], on any device, to uint8 [num_bytes] in host memory, one
    behind the other. Returns the checksum of these bytes, which fill the slot."""
    if not pages or pages[0].device.type == "cpu":
        return _cpu.copy_block_out(pages, block, slot)
    end = 0
    for part in _parts(pages, block):
        end += len(part)
        slot[end - len(part) : end].copy_(part)
    return _cpu.checksum(slot)


def copy_block_in(slot: Tensor, pages: Sequence[Tensor], block: int) -> int:
    """Copy back what `copy_block_out` has copied. Returns the checksum of the slot's bytes: if it is another one, the
    block is of no use."""
    if not pages or pages[0].device.type == "cpu":
        return _cpu.copy_block_in(slot, pages, block)
    end = 0
    for part in _parts(pages, block):
        end += len(part)
        part.copy_(slot[end - len(part) : end])
    return _cpu.checksum(slot)


def checksum(memory: Tensor) -> int:
    """The checksum of uint8 [num_bytes] in host memory: 64 bits, the same with every instruction set."""
    return _cpu.checksum(memory)


def _parts(pages: Sequence[Tensor], block: int) -> list[Tensor]:
    """The block's bytes in each of the tensors, as views."""
    return [one[block].view(-1).view(torch.uint8) for one in pages]
