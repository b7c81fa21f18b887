"""Unpacks the weights of packed checkpoints on the host."""

from __future__ import annotations

from torch import Tensor

from shardline import _cpu
from shardline.models.stored_layout import Codes


def unpack_blocks(blocks: Tensor, kind: int, codes: Tensor, scales: Tensor | None, mins: Tensor | None) -> None:
    """Unpack rows of blocks of GGUF, of the type with the number `kind`.

    `blocks` [N, bytes] uint8 become `codes` [N, K] uint8, those of Q8_0 plus 128, and the small `scales` and `mins` of
    groups [N, G] int8, if the type has them.

    Raises:
        ValueError: there is no such packed type, or the tensors do not fit it.
    """
    _cpu.unpack_blocks(blocks, kind, codes, scales, mins)


def unpack_words(words: Tensor, codes: Tensor, layout: Codes) -> None:
    """Unpack numbers of 4 or 8 bits: `words` [M, W] int32 or uint8, as the file stores them, become `codes`
    [rows, columns] uint8, those that `layout` says.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    along_rows = layout.along == "rows"
    _cpu.unpack_words(words, codes, layout.bits, layout.order, layout.offset % 256, along_rows, layout.transposed)
