"""Products with weights by torch, in tiles of one shape.

A library's product changes its bits with the numbers of rows and columns. So exact numerics call it only with tiles of
`ROWS` rows and `COLUMNS` columns, padded with zeros. `exactness.py` checks that the library gives a row and a column of
such a tile the same bits wherever they are. If tiles of `MANY_ROWS` rows have them too, more rows use these.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.memory import mapped_empty
from shardline.kernels.torch.elementwise import activation
from shardline.kernels.torch.sampling import greedy_argmax, mask_tokens

ROWS, COLUMNS, MANY_ROWS = 8, 128, 64
_WIDENED_BYTES = 4 << 20
"""Bytes of a weight that are converted to a wider dtype at a time."""


class DenseKernels:
    """See `contract.WeightKernels`. Weights lie in rows, in tiles [.., num_tiles, COLUMNS, in_features]; a gated pair
    has the tiles of the gate, then those of up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_exact = True
        """Whether products are cut into tiles, so that rows are padded too."""
        self.uses_many_rows = False
        """Whether larger tiles of rows give the same bits."""
        self.depths: set[int] = set()
        """Numbers of columns of the weights that have been allocated."""

    def activation_empty(self, dtype: torch.dtype, *sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device=self.device)

    def weight_empty(
        self,
        dtype: torch.dtype,
        out_features: int,
        in_features: int,
        *,
        gated: bool = False,
        num_matrices: int | None = None,
    ) -> Tensor:
        self.depths.add(in_features)
        leading, num_tiles = () if num_matrices is None else (num_matrices,), -(-out_features // COLUMNS)
        tiles = self._weights_empty(dtype, *leading, 2 * num_tiles if gated else num_tiles, COLUMNS, in_features)
        if num_tiles:
            padded = tiles[..., num_tiles - 1 :: num_tiles, :, :]
            (padded.view(torch.uint8) if dtype.itemsize == 1 else padded).zero_()
        return tiles

    @staticmethod
    def pack_weight(weight: Tensor, panels: Tensor, first: int = 0, half: int | None = None) -> None:
        place_rows(panels.flatten(0, 1), len(weight), first, half).copy_(weight)

    @staticmethod
    def unpack_rows(panels: Tensor, indices: Tensor, in_features: int) -> Tensor:
        return panels.flatten(0, 1).index_select(0, indices)

    def linear(self, x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor, gate: str | None = None) -> None:
        width = out.shape[1]
        if gate is None:
            out.copy_(self.multiply(x, panels, bias, out.dtype)[:, :width])
            return
        half = len(panels) // 2 * COLUMNS
        if bias is not None:
            bias = torch.cat([F.pad(bias[:width], (0, half - width)), bias[width:]])
        product = self.multiply(x, panels, bias, x.dtype)
        activation(torch.cat([product[:, :width], product[:, half : half + width]], 1), out, gate, True)

    def linear_argmax(
        self, x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, allowed: Tensor | None
    ) -> Tensor:
        return best_of(self.multiply(x, panels, bias, torch.float32)[:, :out_features], allowed)

    def multiply(self, x: Tensor, tiles: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x [M, K] times the transpose of tiles [num_tiles, COLUMNS, K], plus bias: [M, num_tiles * COLUMNS] of
        the wider of `dtype` and x's, in which all of it is computed."""
        num_tiles, _, depth = tiles.shape
        dtype = torch.promote_types(x.dtype, dtype)
        if bias is not None:
            bias = F.pad(bias.to(dtype), (0, num_tiles * COLUMNS - len(bias)))
        if not self.is_exact and tiles.dtype == dtype:
            return F.linear(x, tiles.view(-1, depth), bias)
        size = MANY_ROWS if self.uses_many_rows and len(x) > MANY_ROWS // 2 else ROWS
        rows = F.pad(x.to(dtype), (0, 0, 0, -len(x) % size)).reshape(-1, size, depth)
        tiles_each = max(1, num_tiles)
        if tiles.dtype != dtype:
            tiles_each = max(1, _WIDENED_BYTES // (COLUMNS * depth * dtype.itemsize))
        out = x.new_empty(num_tiles, len(rows), size, COLUMNS, dtype=dtype)
        biases = None if bias is None else bias.view(-1, 1, COLUMNS)
        for first in range(0, num_tiles, tiles_each):
            some = slice(first, first + tiles_each)
            _multiply_tiles(rows, tiles[some].to(dtype), None if biases is None else biases[some], out[some])
        return out.permute(1, 2, 0, 3).reshape(-1, num_tiles * COLUMNS)[: len(x)]

    def pack_heads(self, weights: Tensor) -> Tensor:
        """[num_tiles, num_heads, COLUMNS, in_features]"""
        num_heads, out_features, depth = weights.shape
        self.depths.add(depth)
        padded = F.pad(weights, (0, 0, 0, -out_features % COLUMNS))
        return padded.view(num_heads, -1, COLUMNS, depth).transpose(0, 1).contiguous()

    @staticmethod
    def linear_heads(x: Tensor, panels: Tensor, out: Tensor) -> None:
        num_tokens, num_heads, depth = x.shape
        rows = F.pad(x, (0, 0, 0, 0, 0, -num_tokens % ROWS)).view(-1, ROWS, num_heads, depth).transpose(1, 2)
        for index, tile in enumerate(rows.contiguous()):
            tokens = slice(index * ROWS, min(num_tokens, (index + 1) * ROWS))
            for first, weight in zip(range(0, out.shape[2], COLUMNS), panels, strict=True):
                columns = slice(first, min(out.shape[2], first + COLUMNS))
                product = torch.bmm(tile, weight.mT).transpose(0, 1)
                out[tokens, :, columns] = product[: tokens.stop - tokens.start, :, : columns.stop - columns.start]

    def _weights_empty(self, dtype: torch.dtype, *sizes: int) -> Tensor:
        if self.device.type == "cpu":
            return mapped_empty(sizes, dtype)
        return torch.empty(sizes, dtype=dtype, device=self.device)


def _multiply_tiles(rows: Tensor, tiles: Tensor, biases: Tensor | None, out: Tensor) -> None:
    """Tiles of rows [R, .., K] times tiles [C, COLUMNS, K], plus biases [C, 1, COLUMNS], to out [C, R, .., COLUMNS], in
    as few calls as there can be."""
    if len(rows) <= len(tiles):
        for index, tile in enumerate(rows):
            out[:, index] = _multiply(tile.expand(len(tiles), *tile.shape), tiles.mT, biases)
        return
    for index, tile in enumerate(tiles):
        bias = None if biases is None else biases[index]
        out[index] = _multiply(rows, tile.T.expand(len(rows), *tile.T.shape), bias)


def _multiply(x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(x, y) if bias is None else torch.baddbmm(bias, x, y)


def best_of(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """[M, 2]: the largest of each row of logits [M, N] fp32, and the bits of its column; see `PackedLinear.argmax`."""
    if allowed is not None:
        logits = logits.clone()
        mask_tokens(logits, torch.arange(len(logits), device=logits.device), allowed.view(torch.int32))
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    values = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    greedy_argmax(logits, ids, values)
    return torch.stack([values, ids.to(torch.int32).view(torch.float32)], dim=1)


def place_rows(rows: Tensor, count: int, first: int, half: int | None) -> Tensor:
    """The part of a weight's rows [N, ...] in which `count` rows lie, from row `first` or the begin of a half on."""
    start = first + (0 if half is None else half * (len(rows) // 2))
    return rows[start : start + count]
