"""Products with weights by torch, in tiles of one shape.

A library's product changes its bits with the numbers of rows and columns. So exact numerics call it only with tiles of
`ROWS` rows and `COLUMNS` columns, padded with zeros. `exactness.py` checks that the library gives a row and a column of
such a tile the same bits wherever they are. Whole weights are multiplied, by `SIZES` of rows, where this gives the bits
of tiles. On a CPU, weights are packed (`packed.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.memory import mapped_empty
from shardline.kernels.tensors import RowBias
from shardline.kernels.torch.elementwise import activation
from shardline.kernels.torch.packed import PackedWeights, multiply_packed, packs
from shardline.kernels.torch.sampling import greedy_argmax, mask_tokens

ROWS, COLUMNS = 8, 128
SIZES = (8, 16, 32, 64)
"""Numbers of rows with which whole weights are multiplied."""
_WIDENED_BYTES = 4 << 20
"""Bytes of a weight that are converted to a wider dtype at a time."""


class DenseKernels:
    """See `contract.WeightKernels`. Weights lie in rows, in tiles [.., num_tiles, COLUMNS, in_features]; a gated pair
    has the tiles of the gate, then those of up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_exact = True
        """Whether products are cut into tiles, so that rows are padded too."""
        self.shapes: set[tuple[int, int]] = set()
        """Number of tiles and of columns of the weights that have been allocated."""
        self.whole: set[tuple[torch.dtype, int, int]] = set()
        """Dtype and shape of the weights, or parts of them, for which products with all of it give the same bits."""
        self.packed: PackedWeights | None = PackedWeights()
        """None: all weights are plain."""
        self.copied: list[Tensor] | None = None
        """Weights that are allocated are added to it, and are copied to their memory again and again later; None: those
        that are allocated stay there."""
        self._scratch = threading.local()
        """Of each thread, since adapters are loaded beside steps."""

    def activation(self, x: Tensor, out: Tensor, name: str, gated: bool) -> None:
        activation(x, out, name, gated, self.is_exact)

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
        leading, num_tiles = () if num_matrices is None else (num_matrices,), -(-out_features // COLUMNS)
        all_tiles = 2 * num_tiles if gated else num_tiles
        if num_matrices is None and num_tiles and self.packed is not None and packs(self.device, dtype):
            tiles = self.noted(self.packed.empty(dtype, all_tiles, COLUMNS, in_features, self.copied is None))
        else:
            self.shapes.add((all_tiles, in_features))
            tiles = self.weights_empty(dtype, *leading, all_tiles, COLUMNS, in_features)
        if num_tiles:
            padded = tiles[..., num_tiles - 1 :: num_tiles, :, :]
            (padded.view(torch.uint8) if dtype.itemsize == 1 else padded).zero_()
        return tiles

    @staticmethod
    def pack_weight(weight: Tensor, panels: Tensor, first: int = 0, half: int | None = None) -> None:
        place_rows(panels.flatten(0, 1), len(weight), first, half).copy_(weight)

    def unpack_rows(self, panels: Tensor, indices: Tensor, out: Tensor) -> None:
        tiles = panels if self.packed is None else self.packed.plain(panels)
        torch.index_select(tiles.flatten(0, 1), 0, indices, out=out)

    def linear(
        self, x: Tensor, panels: Tensor, bias: Tensor | RowBias | None, out: Tensor, gate: str | None = None
    ) -> None:
        width = out.shape[1]
        bias, change = split_bias(bias)
        if gate is None:
            out.copy_(change(self.multiply(x, panels, bias, out.dtype)[:, :width]))
            return
        half = len(panels) // 2 * COLUMNS
        if bias is not None:
            bias = torch.cat([F.pad(bias[:width], (0, half - width)), bias[width:]])
        product = self.multiply(x, panels, bias, x.dtype)
        if half != width:
            product = torch.cat([product[:, :width], product[:, half : half + width]], 1)
        self.activation(change(product), out, gate, True)

    def linear_argmax(
        self, x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, allowed: Tensor | None
    ) -> Tensor:
        return best_of(self.multiply(x, panels, bias, torch.float32)[:, :out_features], allowed)

    def multiply(self, x: Tensor, tiles: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x [M, K] times the transpose of tiles [num_tiles, COLUMNS, K], plus bias: [M, num_tiles * COLUMNS] of
        the wider of `dtype` and x's, in which all of it is computed."""
        num_tiles, _, depth = tiles.shape
        dtype = torch.promote_types(x.dtype, dtype)
        rows = x.to(dtype).contiguous()
        if bias is not None:
            bias = F.pad(bias.to(dtype), (0, num_tiles * COLUMNS - len(bias)))
        packed = None if self.packed is None else self.packed.parts(tiles, dtype, self.is_exact)
        if packed is not None:
            biases = [None] * len(packed) if bias is None else torch.split(bias, len(packed[0]))
            parts = [self._multiply_packed(rows, *part) for part in zip(packed, biases, strict=True)]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        each = tiles_at_once(num_tiles, depth, dtype if tiles.dtype != dtype else None)
        parts = []
        for first in range(0, num_tiles, each):
            own_bias = None if bias is None else bias[first * COLUMNS : (first + each) * COLUMNS]
            parts.append(self._multiply_part(rows, self._widened(tiles[first : first + each], dtype), own_bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _widened(self, tiles: Tensor, dtype: torch.dtype) -> Tensor:
        """Tiles in `dtype`, perhaps in memory that the next call uses again: fresh memory costs more than the rest."""
        if tiles.dtype == dtype:
            return tiles
        scratch: Tensor | None = getattr(self._scratch, "tensor", None)
        if scratch is None or scratch.dtype != dtype or scratch.numel() < tiles.numel():
            scratch = self._scratch.tensor = torch.empty(tiles.numel(), dtype=dtype, device=self.device)
        return scratch[: tiles.numel()].view(tiles.shape).copy_(tiles)

    def _multiply_part(self, rows: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
        num_tiles, _, depth = tiles.shape
        weight = tiles.view(-1, depth)
        if not self.is_exact:
            return F.linear(rows, weight, bias)
        if (rows.dtype, num_tiles, depth) not in self.whole:
            return multiply_tiles(rows, tiles, bias)
        return in_sizes(lambda padded: F.linear(padded, weight, bias), rows)

    def _multiply_packed(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not len(rows):
            return rows.new_empty(0, len(weight))
        if not self.is_exact:
            return multiply_packed(rows, weight, bias)
        return in_sizes(lambda padded: multiply_packed(padded, weight, bias), rows)

    def pack_heads(self, weights: Tensor) -> Tensor:
        """[num_tiles, num_heads, COLUMNS, in_features]"""
        num_heads, out_features, depth = weights.shape
        self.shapes.add((1, depth))
        padded = F.pad(weights, (0, 0, 0, -out_features % COLUMNS))
        return self.noted(padded.view(num_heads, -1, COLUMNS, depth).transpose(0, 1).contiguous())

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

    def weights_empty(self, dtype: torch.dtype, *sizes: int) -> Tensor:
        """Memory for weights."""
        on_cpu = self.device.type == "cpu"
        return self.noted(mapped_empty(sizes, dtype) if on_cpu else self.activation_empty(dtype, *sizes))

    def noted(self, weights: Tensor) -> Tensor:
        """The weights, noted in `copied` if it is a list. They are no view, which would hold their first memory after
        they have been given other memory."""
        if weights._is_view():
            place = weights.untyped_storage(), weights.storage_offset(), weights.shape, weights.stride()
            weights = torch.empty(0, dtype=weights.dtype, device=weights.device).set_(*place)
        if self.copied is not None:
            self.copied.append(weights)
        return weights


def split_bias(bias: Tensor | RowBias | None) -> tuple[Tensor | None, Callable[[Tensor], Tensor]]:
    """What the library adds to a product, and what becomes of the product's rows then."""
    return (bias.bias, bias.change) if isinstance(bias, RowBias) else (bias, lambda product: product)


def in_sizes(multiply: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """The products of rows [M, K], in numbers of rows that are among `SIZES`."""
    if len(rows) in SIZES:
        return multiply(rows)
    parts = []
    for some in torch.split(rows, SIZES[-1]):
        size = next(size for size in SIZES if size >= len(some))
        padded = some if size == len(some) else F.pad(some, (0, 0, 0, size - len(some)))
        parts.append(multiply(padded)[: len(some)])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def multiply_tiles(x: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] times the transpose of tiles [num_tiles, columns, K], plus bias: [M, num_tiles * columns]. The library
    multiplies tiles only, in as few calls as there can be."""
    num_tiles, columns, depth = tiles.shape
    rows = F.pad(x, (0, 0, 0, -len(x) % ROWS)).reshape(-1, ROWS, depth)
    biases = None if bias is None else bias.view(-1, 1, columns)
    out = x.new_empty(num_tiles, len(rows), ROWS, columns)
    if len(rows) <= num_tiles:
        for index, tile in enumerate(rows):
            out[:, index] = _multiply(tile.expand(num_tiles, ROWS, depth), tiles.mT, biases)
    else:
        for index, tile in enumerate(tiles):
            own_bias = None if biases is None else biases[index]
            out[index] = _multiply(rows, tile.T.expand(len(rows), depth, columns), own_bias)
    return out.permute(1, 2, 0, 3).reshape(-1, num_tiles * columns)[: len(x)]


def _multiply(x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(x, y) if bias is None else torch.baddbmm(bias, x, y)


def tiles_at_once(num_tiles: int, depth: int, widened: torch.dtype | None) -> int:
    """The tiles of a weight that are multiplied together; fewer if they are converted to a wider dtype before."""
    most = num_tiles if widened is None else _WIDENED_BYTES // (COLUMNS * depth * widened.itemsize)
    return max(1, min(num_tiles, most))


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
