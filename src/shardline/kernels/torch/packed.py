"""Weights in the order in which oneDNN multiplies them: 2 times as fast at few rows in bf16, 3 to 4 times in float32.

A plain weight is brought into that order in every product. Here this happens once, at the weight's first product, and
the memory of the plain weight is given back then, unless its rows are read (those of embeddings). oneDNN's operators
are those that torch's own compiler calls (`torch/csrc` has no public names for them).
"""

from __future__ import annotations

import platform
from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_PART_BYTES = 256 << 20
"""Bytes of a weight that are converted at a time."""
_USUAL_ROWS = 8
"""Rows for which oneDNN chooses the order; it multiplies any number."""


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies packed weights of this dtype here. Other processors than x86's were never tried."""
    if device.type != "cpu" or platform.machine() != "x86_64" or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 or (dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()))


def tiles_of_part(num_tiles: int, columns: int, depth: int, dtype: torch.dtype) -> int:
    """The tiles of a weight that are packed together."""
    return max(1, min(num_tiles, _PART_BYTES // (columns * depth * dtype.itemsize)))


class PackedWeight:
    """The packed parts of a weight, by dtype and by the number of tiles of a part."""

    def __init__(self, stays: bool) -> None:
        self.keeps_plain = False
        """Whether the plain weight is read besides."""
        self._stays = stays
        self._parts: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def parts(self, tiles: Tensor, dtype: torch.dtype, each: int) -> list[Tensor]:
        """The weight whose tiles are [num_tiles, columns, depth], in parts of `each` tiles."""
        if not self._stays:
            return [pack(part.to(dtype)) for part in torch.split(tiles, each)]
        if (dtype, each) not in self._parts:
            self._parts[dtype, each] = [pack(part.to(dtype)) for part in torch.split(self._stored(tiles), each)]
            if not self.keeps_plain and torch.promote_types(dtype, tiles.dtype) == dtype:
                tiles.untyped_storage().resize_(0)  # nothing of it is lost
        return self._parts[dtype, each]

    def plain(self, tiles: Tensor) -> Tensor:
        """The tiles as they were stored, which are kept from now on."""
        self.keeps_plain = True
        return self._stored(tiles)

    def _stored(self, tiles: Tensor) -> Tensor:
        if tiles.numel() and not tiles.untyped_storage().nbytes():
            whole = next(key for key in self._parts if torch.promote_types(key[0], tiles.dtype) == key[0])
            rows = torch.cat([part.to_dense().to(tiles.dtype) for part in self._parts[whole]])
            if not self.keeps_plain:
                return rows.view(tiles.shape)
            tiles.untyped_storage().resize_(tiles.nbytes)
            tiles.copy_(rows.view(tiles.shape))
        return tiles


class PackedWeights:
    """The weights of a stage that are packed."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, int]] = set()
        """Number of tiles and of columns of the weights that have been allocated."""
        self.whole: set[tuple[torch.dtype, int, int]] = set()
        """Dtype and shape of parts that give the bits of their tiles."""
        self._weights: MutableMapping[Tensor, PackedWeight] = WeakIdKeyDictionary()

    def empty(self, dtype: torch.dtype, num_tiles: int, columns: int, depth: int, stays: bool = True) -> Tensor:
        """Memory for the plain tiles of a weight, which can be given back; `stays`: nobody writes to it later."""
        self.shapes.add((num_tiles, depth))
        tiles = torch.empty(num_tiles, columns, depth, dtype=dtype)
        self._weights[tiles] = PackedWeight(stays)
        return tiles

    def parts(self, tiles: Tensor, dtype: torch.dtype, exact: bool) -> list[Tensor] | None:
        """The packed parts of a weight; None of one that is not from `empty`. Tiles are parts of their own if exact
        products need it."""
        if tiles not in self._weights:
            return None
        num_tiles, columns, depth = tiles.shape
        each = tiles_of_part(num_tiles, columns, depth, dtype)
        counts = {each, num_tiles % each} - {0}
        if exact and any((dtype, count, depth) not in self.whole for count in counts):
            each = 1
        return self._weights[tiles].parts(tiles, dtype, each)

    def plain(self, tiles: Tensor) -> Tensor:
        """The tiles, whose memory may have been given back, as they were stored."""
        return self._weights[tiles].plain(tiles) if tiles in self._weights else tiles


def pack(rows: Tensor) -> Tensor:
    """A weight [N, K], or its tiles, in oneDNN's order."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(rows.view(-1, rows.shape[-1]), _USUAL_ROWS)
    return packed


def multiply_packed(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows [M, K] times the transpose of a packed weight [N, K], plus bias: [M, N]. M is not zero."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return product
