"""torch's matrix product in place of ours, for many rows, where a trial has shown that it gives the same bits.

The shape of a product determines the library's kernel, and so the order of its sums. Therefore the library is called
only with numbers of rows that were tried at start-up; other products are padded to the next such number. It is called
only where every element of the trial's random rows equalled ours. So a row's bits do not depend on which product
computed it, on the number of other rows, or on the trial's result for another rank's part of the weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor], object]
"""(x [M, K], weight [N, K], out [M, N]): writes x times the weight's transpose."""

_FEWEST_ROWS = 65
"""With fewer rows, a product is bound by reading the weight, and ours is as fast."""
_GRANULE = 128
_ALIGNMENT = 16  # bytes; a larger alignment does not change the library's choice

_equal_rows: dict[tuple[int, int], frozenset[int]] = {}
"""By shape of the weight: the numbers of rows for which the library gives our bits."""
_is_always = False


def padded_rows(num_rows: int) -> int:
    """The number of rows with which the library is called: a multiple of 128, above 4,096 rows of 256, and so on; fewer
    than 65 rows are not padded."""
    if num_rows < _FEWEST_ROWS:
        return num_rows
    granule = _GRANULE
    while num_rows > 32 * granule:
        granule *= 2
    return -(-num_rows // granule) * granule


def tried_rows(most: int) -> list[int]:
    """Every number that `padded_rows` returns for up to `most` rows, ascending."""
    sizes, rows = [], _FEWEST_ROWS
    while rows <= most:
        sizes.append(padded_rows(rows))
        rows = sizes[-1] + 1
    return sizes


def equal_sizes(
    ours: Product, library: Product, x: Tensor, weight: Tensor, sizes: Sequence[int], seconds: float
) -> frozenset[int]:
    """Those of `sizes` for which the library gives the first rows of x the same bits as `ours`, whose rows do not
    depend on their neighbours. Sizes are tried in order; sizes that are not reached within `seconds` are left out.
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
    """From now on, use the library's product for these weight shapes [N, K] at these numbers of rows, or, with
    `always`, for all products even if bits change. This holds for the whole process, which is one rank."""
    global _is_always
    _equal_rows.clear()
    _equal_rows.update(equal_rows)
    _is_always = always


def library_computes(num_rows: int, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the library's product should be used."""
    shape = (weight.shape[0], weight.shape[1])
    return _is_always or (bias is None and padded_rows(num_rows) in _equal_rows.get(shape, ()))


def library_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> bool:
    """Compute `kernels.linear.linear` with the library if it should be used and can be. Returns whether it was used."""
    if out.dtype != x.dtype or weight.dtype != x.dtype or not library_computes(len(x), weight, bias):
        return False
    if _is_always:
        matmul(x, weight, out) if bias is None else torch.addmm(bias, x, weight.T, out=out)
        return True
    rows = padded_rows(len(x))
    x_rows, out_rows = _first_rows(x, rows), _first_rows(out, rows)
    # This overwrites the memory after the rows of `out`, so `out` must have been allocated with the padding rows.
    if x_rows is None or out_rows is None or out.untyped_storage().nbytes() != out_rows.nbytes:
        return False
    matmul(x_rows, weight, out_rows)
    return True


def matmul(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """The library's product."""
    torch.mm(x, weight.T, out=out)


def _first_rows(x: Tensor, rows: int) -> Tensor | None:
    """x extended to `rows` rows, into the memory after it; None if there is too little memory, or x is not contiguous
    and aligned."""
    end = (x.storage_offset() + rows * x.shape[1]) * x.element_size()
    if not x.is_contiguous() or end > x.untyped_storage().nbytes() or x.data_ptr() % _ALIGNMENT:
        return None
    return x.as_strided((rows, x.shape[1]), x.stride())
