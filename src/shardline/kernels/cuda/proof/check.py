"""What a kernel must do: give torch's values, the same bits again, the same for a row alone, and write nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.stand_ins import StandIns

_EDGE = 256
"""Bytes before and after each tensor; those of inputs are NaN, and those of outputs must stay."""
_FILL = 0xFF
"""The byte of which NaN consists in every floating-point type, and -1 in integers."""


class _Bounds(NamedTuple):
    """How far values may be from torch's, as shares of the root of the mean square of the expected ones."""

    mean: float
    """Of the root of the mean square of all differences."""
    most: float
    """Of one difference; the expected value itself is added to that root."""


_BOUNDS = {torch.float32: _Bounds(1e-4, 4e-3), torch.bfloat16: _Bounds(2**-7, 2**-4)}


class Memory:
    """Tensors of a trial, with edges, so that reads and writes beyond them are noticed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rng = torch.Generator().manual_seed(0)
        self._outputs: list[Tensor] = []

    def empty(self, *sizes: int, dtype: torch.dtype) -> Tensor:
        """An output, whose elements are NaN or -1 until they are written."""
        tensor = self._edged(sizes, dtype)
        self._outputs.append(tensor)
        return tensor

    def place(self, values: Tensor) -> Tensor:
        """A copy of an input."""
        return self._edged(tuple(values.shape), values.dtype).copy_(values)

    def numbers(self, *sizes: int, dtype: torch.dtype) -> Tensor:
        """Random numbers with the deviation one."""
        return self.place(torch.randn(*sizes, generator=self._rng).to(dtype))

    def below(self, bound: int, *sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Random whole numbers from 0 on."""
        return self.place(torch.randint(0, bound, sizes, generator=self._rng).to(dtype))

    def order(self, count: int) -> Tensor:
        """The numbers below `count` in a random order."""
        return torch.randperm(count, generator=self._rng)

    def is_overrun(self) -> bool:
        """Whether something was written beyond an output of the last calls, which are then forgotten."""
        outputs, self._outputs = self._outputs, []
        return any(bool((edge != _FILL).any()) for tensor in outputs for edge in _edges(tensor))

    def _edged(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = torch.Size(sizes).numel() * dtype.itemsize
        padded = -(-count // 16) * 16 + 2 * _EDGE
        whole = torch.full((padded,), _FILL, dtype=torch.uint8, device=self.device)
        return whole[_EDGE : _EDGE + count].view(dtype).view(*sizes)


def _edges(tensor: Tensor) -> tuple[Tensor, Tensor]:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole[:_EDGE], whole[_EDGE + tensor.nbytes :]


Outputs = tuple[Tensor, ...]
Compute = Callable[[Any, slice], Outputs]
"""Kernels and some rows -> new outputs for these rows, which are their first dimension."""
ALL = slice(None)
EVEN = ((0, 1), (2, 5))
"""Places among few rows."""


@dataclass(frozen=True)
class Trial:
    """One way of calling a kernel."""

    compute: Compute
    places: Sequence[tuple[int, int]] = ()
    """Rows (first, end) that are computed alone too, and must have the same bits as in the whole."""
    same_as: Callable[[], Outputs] | None = None
    """What other Triton kernels give in another way, with the same bits; None: torch's kernels are compared."""


def product(
    memory: Memory, x: Tensor, columns: int, dtype: torch.dtype, call: Callable[[Any, Tensor, Tensor], None]
) -> Compute:
    """A product of rows of x to [M, columns]; `call` gets the kernels, some rows of x and an output for them."""

    def compute(kernels: Any, rows: slice) -> Outputs:
        out = memory.empty(len(x[rows]), columns, dtype=dtype)
        call(kernels, x[rows], out)
        return (out,)

    return compute


Sizes = Mapping[str, Any]
Trials = Iterator[Trial]
MakeTrials = Callable[[Memory, CudaKernels, torch.dtype, Sizes], Trials]
"""(memory, the kernels, the activations' dtype, the case's sizes) -> trials."""


def examine(trial: Trial, memory: Memory, own: CudaKernels, stand_ins: StandIns) -> str:
    """What is wrong with a kernel; empty: nothing."""
    memory.is_overrun()
    with _nothing_kept():
        whole = trial.compute(own, ALL)
    if memory.is_overrun():
        return "writes beyond its output"
    expected = trial.compute(stand_ins, ALL) if trial.same_as is None else trial.same_as()
    for found, wanted in zip(whole, expected, strict=True):
        if trial.same_as is not None and not _same(found, wanted):
            return f"has other bits than the kernels that it stands for{_apart(found, wanted)}"
        if problem := _deviation(found, wanted):
            return problem
    if not all(map(_same, trial.compute(own, ALL), whole)):
        return "gives other bits the second time"
    for rows in (slice(*place) for place in trial.places):
        alone = trial.compute(own, rows)
        if not all(_same(found, of_all[rows]) for found, of_all in zip(alone, whole, strict=True)):
            return f"gives rows {rows.start} to {rows.stop - 1} other bits alone than among others"
    return "writes beyond its output" if memory.is_overrun() else ""


@contextmanager
def _nothing_kept() -> Iterator[None]:
    """`torch.empty` gives NaN and the largest integers, so that reads of what no kernel has written are noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(_bits(found), _bits(expected))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def _apart(found: Tensor, expected: Tensor) -> str:
    return "" if _bits(found).shape != _bits(expected).shape else f" ({int((_bits(found) != _bits(expected)).sum())})"


def _deviation(found: Tensor, expected: Tensor) -> str:
    """Why values are not the expected ones."""
    if not found.dtype.is_floating_point or found.dtype not in _BOUNDS:
        wrong = int((_bits(found) != _bits(expected)).sum())
        return f"{wrong} of {found.numel()} numbers are wrong" if wrong else ""
    bounds = _BOUNDS[found.dtype]
    ours, theirs = found.double(), expected.double()
    finite = theirs.isfinite()
    if not torch.equal(ours.where(~finite, 0.0).nan_to_num(1.0), theirs.where(~finite, 0.0).nan_to_num(1.0)):
        return "an infinite number or NaN is at another place"
    error, size = (ours - theirs)[finite], theirs[finite]
    root = float(size.square().mean().sqrt()) if len(size) else 0.0
    if not bool(error.isfinite().all()):
        return f"{int((~error.isfinite()).sum())} of {found.numel()} numbers are NaN or infinite, or were not written"
    if not len(error) or not bool(error.any()):
        return ""
    mean, most = float(error.square().mean().sqrt()), float((error.abs() / (root + size.abs())).max())
    if mean > bounds.mean * root or most > bounds.most:
        return f"differs from torch by {mean / max(root, 1e-30):.1e} of the values' size, at most {most:.1e}"
    return ""
