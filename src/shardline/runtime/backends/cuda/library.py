"""torch's own matrix product in place of ours, for many rows, where it was seen to give the same bits.

Which kernel the library takes, and with it the order of its sums, follows from the shape of a product. So it is only
called with numbers of rows that were tried at the start, a product of others being filled up to the next, and only
where every element of random rows came out as ours: then it does not matter to a row which of the two computed it, nor
how many rows lie beside it, nor what another rank found out about its part of the weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor], object]
"""(x [M, K], weight [N, K], out [M, N]): writes x times the weight's transpose."""

_FEWEST_ROWS = 65
"""With fewer a product streams its weight, and ours is as fast."""
_GRANULE = 128
_ALIGNMENT = 16  # bytes; beyond, the library does not tell addresses apart

_equal_rows: dict[tuple[int, int], frozenset[int]] = {}
"""By shape of the weight: numbers of rows with which the library has our bits."""
_is_always = False


def padded_rows(num_rows: int) -> int:
    """The number of rows that the library is called with: a multiple of 128, above 4,096 of 256, and so on."""
    if num_rows < _FEWEST_ROWS:
        return num_rows
    granule = _GRANULE
    while num_rows > 32 * granule:
        granule *= 2
    return -(-num_rows // granule) * granule


def tried_rows(most: int) -> list[int]:
    """Every number that `padded_rows` gives for up to `most` rows, ascending."""
    sizes, rows = [], _FEWEST_ROWS
    while rows <= most:
        sizes.append(padded_rows(rows))
        rows = sizes[-1] + 1
    return sizes


def equal_sizes(
    ours: Product, library: Product, x: Tensor, weight: Tensor, sizes: Sequence[int], seconds: float
) -> frozenset[int]:
    """Those of `sizes`, tried in that order, with which the library gives every one of the first rows of x the bits
    that ours does, whose rows are known not to depend on their neighbours. What `seconds` do not suffice for is none.
    """
    expected = x.new_empty(max(sizes), weight.shape[0])
    ours(x[: max(sizes)], weight, expected)
    found, out, deadline = set(), torch.empty_like(expected), time.monotonic() + seconds
    for size in sizes:
        if time.monotonic() >= deadline:
            break
        library(x[:size], weight, out[:size])
        if torch.equal(out[:size].view(torch.int16), expected[:size].view(torch.int16)):
            found.add(size)
    return frozenset(found)


def use_library(equal_rows: Mapping[tuple[int, int], frozenset[int]], *, always: bool = False) -> None:
    """From here on take the library's product with these weights [N, K] at these numbers of rows, or `always`, bits or
    not; for the whole process, which is one rank."""
    global _is_always
    _equal_rows.clear()
    _equal_rows.update(equal_rows)
    _is_always = always


def library_computes(num_rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the library's product is wanted."""
    shape = (weight.shape[0], weight.shape[1])
    return _is_always or (bias is None and padded_rows(num_rows) in _equal_rows.get(shape, ()))


def library_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> bool:
    """Compute `linear.linear` with the library, if that is wanted and can be; whether it was."""
    if out.dtype != x.dtype or weight.dtype != x.dtype or not library_computes(len(x), weight, bias):
        return False
    if _is_always:
        matmul(x, weight, out) if bias is None else torch.addmm(bias, x, weight.T, out=out)
        return True
    rows = padded_rows(len(x))
    x_rows, out_rows = _first_rows(x, rows), _first_rows(out, rows)
    # What lies behind the rows of `out` is overwritten: only where it was allocated for that.
    if x_rows is None or out_rows is None or out.untyped_storage().nbytes() != out_rows.nbytes:
        return False
    matmul(x_rows, weight, out_rows)
    return True


def matmul(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """The library's product."""
    torch.mm(x, weight.T, out=out)


def _first_rows(x: Tensor, rows: int) -> Tensor | None:
    """x with as many rows as asked for, out of the memory behind it; None where there is too little, or gaps."""
    end = (x.storage_offset() + rows * x.shape[1]) * x.element_size()
    if not x.is_contiguous() or end > x.untyped_storage().nbytes() or x.data_ptr() % _ALIGNMENT:
        return None
    return x.as_strided((rows, x.shape[1]), x.stride())
