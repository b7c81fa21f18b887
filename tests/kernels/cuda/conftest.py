"""The Triton kernels run here on the CPU, in Triton's interpreter (see tests/conftest.py)."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.experimental.gluon  # noqa: F401 (torch imports it later)
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, TensorHandle

import shardline.runtime.machines.cuda.machine  # noqa: F401 (its kernels, while the interpreter is chosen)
from shardline.runtime.machines.host import machine as host_backend
from tests.kernels.cuda.helpers import InterpretedBackend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton's interpreter makes scalars of arrays in a way that numpy is about to forbid."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"))


@pytest.fixture(autouse=True)
def gpu_arithmetic() -> Iterator[None]:
    """Overflow to infinity, as on a GPU: the interpreter computes in numpy, which warns."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        yield


def _values(handle: TensorHandle) -> np.ndarray:
    """The values of a tile, in fp32 or int32; the interpreter holds bf16 and fp8 as their bits."""
    if handle.dtype.scalar == tl.int8:
        return handle.data.astype(np.int32)
    if handle.dtype.scalar == tl.float8e4nv:
        return torch.from_numpy(handle.data.copy()).view(torch.float8_e4m3fn).float().numpy()
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


_CACHED = 8192
"""Products that are computed at a time, so that they stay in the cache until they are added."""


def _dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, total: TensorHandle, *_: object) -> TensorHandle:
    """total + a @ b as the kernels count on it: a chain in the order of K.

    The interpreter's own goes to BLAS, whose bits depend on the place of a row, and takes bf16 for integers.
    """
    left, right, chain = _values(a), _values(b), total.data.copy()
    rows, depth = np.arange(len(left)), np.arange(len(right))
    if np.isfinite(left).all() and np.isfinite(right).all():  # then zeros, which pad tiles, add nothing
        rows, depth = np.flatnonzero(left.any(axis=1)), np.flatnonzero(left.any(axis=0) & right.any(axis=1))
    left, right, part = left[np.ix_(rows, depth)].T[:, :, None], right[depth, None], chain[rows]
    links = max(1, _CACHED // max(1, part.size))
    for begin in range(0, len(depth), links):
        products = np.multiply(left[begin : begin + links], right[begin : begin + links], order="C")
        products[0] += part
        part = np.add.reduce(products, axis=0)  # one after the other, as it is not the last axis
    chain[rows] = part
    return TensorHandle(chain, total.dtype.scalar)


_NARROW = {tl.bfloat16: (torch.bfloat16, torch.uint16), tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8)}
_convert_float = interpreter._convert_float


def _rounded(data: np.ndarray, given: tl.dtype, wanted: tl.dtype, rounding: object) -> np.ndarray:
    """Conversion of fp32 as the hardware does it. The interpreter's own forgets to carry: 7.96 becomes 4 in fp8."""
    if given != tl.float32 or wanted not in _NARROW:
        return _convert_float(data, given, wanted, rounding)
    narrow, bits = _NARROW[wanted]
    return torch.from_numpy(np.ascontiguousarray(data)).to(narrow).view(bits).numpy()


def _fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """x * y + z, rounded once (but for what 64 bits cannot tell from halfway): the interpreter's own rounds twice."""
    exact = x.data.astype(np.longdouble) * y.data + z.data
    return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


def _integers_to_float(self: InterpreterBuilder, x: TensorHandle, wanted: tl.dtype) -> TensorHandle:
    """The interpreter's own takes integers for the bits of bf16."""
    if wanted.scalar == tl.bfloat16:
        return TensorHandle(_rounded(x.data.astype(np.float32), tl.float32, tl.bfloat16, None), tl.bfloat16)
    return TensorHandle(x.data.astype(interpreter._get_np_dtype(wanted)), wanted.scalar)


_describe_block, _np_dtype = tl.block_type.__init__, interpreter._get_np_dtype
_BLOCKS: dict[tuple[object, ...], dict[str, object]] = {}
_SHAPES: dict[tuple[int, ...], tuple[object, object]] = {}
_NP_DTYPES: dict[str, np.dtype] = {}


def _init_block(self: tl.block_type, element_type: tl.dtype, shape: Iterable[object]) -> None:
    """The attributes of an equal type, if there was one."""
    key = (element_type.name, *shape)
    known = _BLOCKS.get(key)
    if known is None:
        _describe_block(self, element_type, list(shape))
        known = _BLOCKS[key] = self.__dict__
    self.__dict__ = known


def _init_tensor(self: tl.tensor, handle: TensorHandle, type: tl.dtype) -> None:
    """As in Triton, but tensors of equal shapes share what describes their shapes."""
    sizes = tuple(type.shape.values) if type.is_block() else ()
    known = _SHAPES.get(sizes)
    if known is None:
        known = _SHAPES[sizes] = tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))
    self.shape, self.numel = known
    self.handle, self.type, self.dtype = handle, type, type.scalar


def _equal_tuples(self: tl.tuple, other: Iterable[object]) -> tl.constexpr:
    return tl.constexpr(self.values == list(other))


def _np_dtype_of(type: tl.dtype) -> np.dtype:
    name = type.scalar.name
    if name not in _NP_DTYPES:
        _NP_DTYPES[name] = _np_dtype(type)
    return _NP_DTYPES[name]


@pytest.fixture(autouse=True, scope="package")
def fast_interpreter() -> Iterator[None]:
    """The interpreter describes the type of every value anew, which takes longer than most operations. It also checks
    every sum and product of 32-bit integers for overflow, which GPUs do not, in six further operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tl.block_type, "__init__", _init_block)
        patch.setattr(tl.tensor, "__init__", _init_tensor)
        patch.setattr(tl.tuple, "__eq__", _equal_tuples)
        patch.setattr(interpreter, "_get_np_dtype", _np_dtype_of)
        patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *operands: None)
        yield


@pytest.fixture(autouse=True, scope="package")
def language_of_the_interpreter() -> Iterator[None]:
    """Patched once. The interpreter does it at every call of a function, which takes longer than most functions."""
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
        yield
    scope.restore()


@pytest.fixture(autouse=True)
def hardware_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)
    monkeypatch.setattr(InterpreterBuilder, "create_fma", _fma)
    monkeypatch.setattr(InterpreterBuilder, "create_si_to_fp", _integers_to_float)
    monkeypatch.setattr(interpreter, "_convert_float", _rounded)


@pytest.fixture
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For ranks that are threads: the interpreter keeps the place of the running program in a global, and parses a
    kernel when it first runs, where CPython's ast fails if several threads parse at once (its issue 106905)."""
    lock, run = threading.Lock(), GridExecutor.__call__
    parsing, parse = threading.Lock(), InterpretedFunction.rewrite

    def parse_alone(self: InterpretedFunction) -> object:
        with parsing:
            return parse(self)

    monkeypatch.setattr(InterpretedFunction, "rewrite", parse_alone)

    def locked(self: GridExecutor, *args: object, **options: object) -> None:
        with lock, np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            run(self, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", locked)


@pytest.fixture
def interpreted_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank that opens its back end from here on is a GPU in the interpreter."""
    monkeypatch.setattr(host_backend, "open_backend", lambda rank, threads: InterpretedBackend())
