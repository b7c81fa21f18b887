"""A check at start: does torch give the same bits wherever a row or a column is? Exact numerics need it.

The results of a batch are compared with those of its rows alone, at other places and among others, and, on a CPU, with
those of one thread, since ranks may have unlike numbers of threads.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shardline.kernels.low_rank import RANK_BLOCK
from shardline.kernels.torch.linear import COLUMNS, ROWS, SIZES, multiply_tiles, tiles_at_once
from shardline.kernels.torch.packed import PackedWeights, multiply_packed, pack, packs, tiles_of_part
from shardline.kernels.torch.torch_kernels import TorchKernels

_NUM_ROWS = 2 * ROWS + 5
_NUM_COLUMNS = COLUMNS + 57
_CHOSEN = ((0, 1), (ROWS - 1, ROWS), (ROWS, ROWS + 3), (3, 2 * ROWS + 2))
"""Rows that are computed alone."""
_COLUMNS = ((0, 1), (1, 78), (COLUMNS - 1, _NUM_COLUMNS), (_NUM_COLUMNS - 1, _NUM_COLUMNS))
_MANY = 5
"""Times that rows are repeated, so that there are more tiles of rows than of columns."""

_CURVES = (torch.exp, torch.tanh, torch.special.erfc)
"""All functions of torch on which bits rest, besides arithmetic."""

_log = logging.getLogger(__name__)


_Numbers = Callable[..., Tensor]
"""Random numbers of these sizes, in a `dtype`."""


def check_exactness(kernels: TorchKernels, dtype: torch.dtype) -> None:
    """Compare what this device computes in `dtype`, for the weights that `kernels` hold. If packed weights do not
    pass, `kernels` keep them plain.

    Raises:
        ValueError: bits depend on the place or on the neighbours. The message says what would work.
    """
    started = time.perf_counter()
    rng = torch.Generator().manual_seed(0)

    def numbers(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*sizes, generator=rng).to(kernels.device, dtype)

    plain = frozenset(kernels.shapes)  # the check's own weights are no part of it
    checked: list[tuple[TorchKernels | PackedWeights, frozenset[tuple[int, int]]]] = []
    if kernels.packed is not None:
        packed = frozenset(kernels.packed.shapes)
        try:
            _check_products(kernels, kernels.packed, packed, numbers, dtype)
            checked.append((kernels.packed, packed))
        except ValueError:
            kernels.packed, plain = None, plain | packed
    _check_products(kernels, kernels, plain, numbers, dtype)
    checked.append((kernels, plain))
    shapes = [(form, shape) for form, own in checked for shape in own]
    for depth in sorted({depth for _, (_, depth) in shapes}):
        norms = partial(_norms, kernels, numbers(depth))
        _check_rows(f"norms of {depth} elements", norms, numbers(_NUM_ROWS, depth))
    for depth, blocks in sorted(kernels.low_rank_shapes):
        _check_low_rank(kernels, numbers(_NUM_ROWS, depth), numbers(blocks, RANK_BLOCK, depth), numbers)
    _check_rows("attention", partial(_attention, kernels, numbers(2 * 300, 2, 64)), numbers(_NUM_ROWS, 6, 64))
    states = partial(_states, kernels, numbers(128, 4, dtype=torch.float32))
    _check_rows("states", states, numbers(_NUM_ROWS, 182))
    curves = numbers(4099, dtype=torch.float32)
    for function in _CURVES:
        whole = function(curves)
        for begin, end in ((1, 4099), (3, 4000), (7, 29), (500, 517)):
            _compare(f"torch.{function.__name__}", function(curves[begin:end].clone()), whole[begin:end])
    _log.info(
        "rows have the same bits alone and among others; %d of %d weights' shapes are multiplied whole (%.2f s)",
        sum((dtype, *shape) in form.whole for form, shape in shapes),
        len(shapes),
        time.perf_counter() - started,
    )


def known_answer(kernels: TorchKernels) -> str:
    """A digest of what products and functions give for fixed numbers, which ranks compare: a library may choose its
    code by the processor. It takes about 10 ms."""
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        for depth in (256, 1999):
            x, tiles = (_fixed(rows * depth, dtype).to(kernels.device) for rows in (ROWS, COLUMNS))
            x, tiles = x.view(ROWS, depth), tiles.view(1, COLUMNS, depth)
            _update(digest, multiply_tiles(x, tiles, None))
            if kernels.packed is not None and packs(kernels.device, dtype):
                _update(digest, multiply_packed(x, pack(tiles[0]), None))
    numbers = _fixed(4099, torch.float32).to(kernels.device)
    for function in _CURVES:
        _update(digest, function(8 * numbers))
    return digest.hexdigest()[:12]


def _fixed(count: int, dtype: torch.dtype) -> Tensor:
    """Numbers from -1 to 1, computed from whole numbers, so that they are the same everywhere."""
    return ((torch.arange(count) * 40503 % 4093).float() / 2048 - 1).to(dtype)


def _update(digest: hashlib._Hash, x: Tensor) -> None:
    digest.update(_bits(x).cpu().numpy().tobytes())


def _check_products(
    kernels: TorchKernels,
    form: TorchKernels | PackedWeights,
    shapes: frozenset[tuple[int, int]],
    numbers: _Numbers,
    dtype: torch.dtype,
) -> None:
    """Check the products with weights that are plain or packed, and note which are multiplied whole."""
    form.whole.clear()
    for depth in sorted({depth for _, depth in shapes}):
        x, weight, bias = numbers(_NUM_ROWS, depth), numbers(_NUM_COLUMNS, depth), numbers(_NUM_COLUMNS)
        for out_dtype in {dtype, torch.float32}:
            _check_product(kernels, x, weight, bias, out_dtype, form is not kernels)
    for num_tiles, depth in sorted(shapes):
        for own in {dtype, torch.float32}:
            _try_whole(form, partial(numbers, dtype=own), num_tiles, depth, own, own != dtype)


def _check_product(
    kernels: TorchKernels, x: Tensor, weight: Tensor, bias: Tensor, out_dtype: torch.dtype, packed: bool
) -> None:
    what = f"products of {x.shape[1]} columns"

    def multiply(x: Tensor, columns: slice, bias: Tensor | None = bias) -> Tensor:
        part = weight[columns]
        if packed:
            tiles = kernels.weight_empty(weight.dtype, *part.shape)
        else:  # those of experts are
            tiles = kernels.weight_empty(weight.dtype, *part.shape, num_matrices=1)[0]
        kernels.pack_weight(part, tiles)
        product = kernels.multiply(x, tiles, None if bias is None else bias[columns], out_dtype)
        return product[:, : len(part)]

    all_columns = slice(None)
    _check_rows(what, lambda x: multiply(x, all_columns), x)
    _check_rows(what, lambda x: multiply(x, all_columns, None), x)
    whole = multiply(x, all_columns)
    for columns in (slice(*bounds) for bounds in _COLUMNS):
        _compare(what, multiply(x, columns), whole[:, columns])
    _compare(what, multiply(x.repeat(_MANY, 1), all_columns), whole.repeat(_MANY, 1))


def _check_low_rank(kernels: TorchKernels, x: Tensor, down: Tensor, numbers: Callable[..., Tensor]) -> None:
    """Check products of adapters of each number of blocks of ranks."""
    for count in range(1, len(down) + 1):
        what, own = f"adapters of rank {count * RANK_BLOCK}", down[:count]
        up = numbers(count * RANK_BLOCK, _NUM_COLUMNS)
        _check_rows(what, partial(_low_rank, kernels, own, up), x)
        whole = _low_rank(kernels, own, up, x)
        for columns in (slice(*bounds) for bounds in _COLUMNS):
            _compare(what, _low_rank(kernels, own, up[:, columns], x), whole[:, columns])


def _low_rank(kernels: TorchKernels, down: Tensor, up: Tensor, x: Tensor) -> Tensor:
    return kernels.multiply_low_rank(x, down, up, 0.7)[:, : up.shape[1]]


def _try_whole(
    form: TorchKernels | PackedWeights,
    numbers: _Numbers,
    num_tiles: int,
    depth: int,
    dtype: torch.dtype,
    is_widened: bool,
) -> None:
    """Note which products with many tiles of a weight have the bits of each tile's."""
    packed = isinstance(form, PackedWeights)
    if packed:
        each = tiles_of_part(num_tiles, COLUMNS, depth, dtype)
    else:
        each = tiles_at_once(num_tiles, depth, dtype if is_widened else None)
    for count in {each, num_tiles % each} - {0}:
        x, pair, bias = numbers(SIZES[-1], depth), numbers(2, COLUMNS, depth), numbers(2 * COLUMNS)
        # Two tiles, again and again.
        tiles = pair.repeat(-(-count // 2), 1, 1)[:count]
        biases = bias.repeat(-(-count // 2))[: count * COLUMNS]
        multiply, weight = (multiply_packed, pack(tiles)) if packed else (F.linear, tiles.view(-1, depth))
        of_tiles = _multiply_packed_tiles if packed else multiply_tiles
        pairs = (
            (multiply(x[:size], weight, own_bias), of_tiles(x[:size], tiles, own_bias))
            for size in SIZES
            for own_bias in (None, biases)
        )
        if all(torch.equal(_bits(whole), _bits(parts)) for whole, parts in pairs):
            form.whole.add((dtype, count, depth))


def _multiply_packed_tiles(x: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
    """See `multiply_tiles`; only the first two tiles are unlike."""
    parts = []
    for index, tile in enumerate(tiles[:2]):
        weight, own_bias = pack(tile), None if bias is None else bias[index * COLUMNS : (index + 1) * COLUMNS]
        parts.append(torch.cat([multiply_packed(rows, weight, own_bias) for rows in torch.split(x, ROWS)]))
    return torch.cat(parts, 1).repeat(1, -(-len(tiles) // 2))[:, : len(tiles) * COLUMNS]


def _check_rows(what: str, compute: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Compare what is computed of some rows of x with the same rows of the whole."""
    whole = compute(x)
    with _one_thread(x.device):
        _compare(f"{what} in one thread", compute(x), whole)
    for rows in (slice(*bounds) for bounds in _CHOSEN):
        _compare(what, compute(x[rows]), whole[rows])


def _norms(kernels: TorchKernels, weight: Tensor, x: Tensor) -> Tensor:
    out = torch.empty(2, *x.shape, dtype=x.dtype, device=x.device)
    kernels.rms_norm(x, weight, out[0], 1e-5, 0.0, None, None)
    kernels.layer_norm(x, weight, None, out[1], 1e-5, None, None)
    return out.transpose(0, 1)


def _attention(kernels: TorchKernels, cached: Tensor, x: Tensor) -> Tensor:
    """One sequence for each row of x [M, Hq, D], all of the same keys."""
    block_size = 4
    keys, values = cached.transpose(0, 1).view(2, 2, -1, block_size, cached.shape[2]).transpose(1, 2).contiguous()
    count, blocks = len(x), torch.arange(keys.shape[0], dtype=torch.int32, device=x.device)
    out = torch.empty_like(x)
    kernels.paged_attention(
        x,
        keys,
        values,
        blocks.expand(count, -1),
        torch.arange(count + 1, dtype=torch.int32),
        torch.full((count,), 270, dtype=torch.int32),
        out,
        x.shape[2] ** -0.5,
        None,
        None,
        None,
        None,
        None,
        False,
    )
    return out


def _states(kernels: TorchKernels, weights: Tensor, x: Tensor) -> Tensor:
    """A token of a sequence for each row of x [M, 182], all with the same state: one key head, three value heads."""
    count, heads, key_dim, value_dim = len(x), 3, 40, 16
    qkv, gate, beta, decay = torch.split(x, [2 * key_dim + heads * value_dim, heads * value_dim, heads, heads], dim=1)
    numbers, own = weights.flatten(), torch.arange(count + 1, dtype=torch.int32, device=x.device)
    state = numbers[: heads * key_dim].view(1, heads, key_dim, 1).repeat(count, 1, 1, value_dim)
    out = torch.empty(count, heads * value_dim, dtype=x.dtype, device=x.device)
    kernels.delta_rule(
        *(qkv, gate, beta, decay, weights, numbers[:3], numbers[3:6], x.new_ones(value_dim), state),
        *(x.new_ones(count, 3, qkv.shape[1]), own, torch.full_like(own[1:], 5), own[:-1], out, 1e-5),
    )
    kernels.gate_heads(out.view(count, heads, value_dim), gate.reshape(count, heads, value_dim))
    return out


def _compare(what: str, found: Tensor, expected: Tensor) -> None:
    if not torch.equal(_bits(found), _bits(expected)):
        raise ValueError(
            f"{what} have other bits at other places on this device, so answers would depend on the batch and the "
            "layout; use --numerics fast"
        )


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32 if x.itemsize == 4 else torch.int16)


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, torch computes in one thread meanwhile."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if device.type == "cpu":
            torch.set_num_threads(threads)
