"""One dense tensor of floating-point numbers from a file that `torch.save` has written.

Such a file is a zip archive with a pickle in it. Nothing is unpickled here: the few operations that describe a tensor
are read as data, every other one is refused, and no name in the file is looked up or called.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

MAX_DESCRIPTION_BYTES = 4096
"""Longer than any description of one tensor."""
_MAX_ENTRIES = 32
_STORAGES = {"FloatStorage": "f4", "DoubleStorage": "f8", "HalfStorage": "f2", "BFloat16Storage": "u2"}
_REBUILD = "torch._utils _rebuild_tensor_v2"


def read_torch_tensor(content: bytes) -> Floats:
    """The tensor in the bytes of a file, as float32.

    Raises:
        ValueError: they are no such file, or hold something else than one dense tensor of floating-point numbers.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
        entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, struct.error) as error:
        raise ValueError(f"it is no file of torch.save: {error}") from None
    if len(entries) > _MAX_ENTRIES or any(
        entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(content) for entry in entries
    ):
        raise ValueError("it is no file of torch.save: it is compressed, or has too many entries")
    found = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
    if len(found) != 1 or found[0].file_size > MAX_DESCRIPTION_BYTES:
        raise ValueError("it is no file of torch.save with one tensor")
    folder = found[0].filename.removesuffix("data.pkl")

    def read(name: str) -> bytes:
        try:
            return archive.read(folder + name)
        except (KeyError, zipfile.BadZipFile, OSError, EOFError, RuntimeError, NotImplementedError) as error:
            raise ValueError(f"its entry {name!r} cannot be read: {error}") from None

    tensor = _describe(_Description(read("data.pkl")).value())
    names = {entry.filename for entry in entries}
    if folder + "byteorder" in names and read("byteorder") != b"little":
        raise ValueError("its numbers are big-endian; only little-endian ones are taken")
    return _as_floats(read(f"data/{tensor.key}"), tensor)


class _Global(NamedTuple):
    """A name that the pickle mentions; it stays a name."""

    name: str


class _Call(NamedTuple):
    """A call that the pickle describes; nothing is called."""

    function: Any
    arguments: Any


class _Storage(NamedTuple):
    """The persistent id of a storage."""

    value: Any


class _Tensor(NamedTuple):
    key: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _describe(value: Any) -> _Tensor:
    """The tensor that a description is about."""
    if isinstance(value, _Call) and value.function == _Global("torch._utils _rebuild_sparse_tensor"):
        raise ValueError("it is a sparse tensor; only dense ones are taken")
    match value:
        case _Call(_Global(name), (_Storage(("storage", _Global(kind), str(key), str(), int())), *rest)) if (
            name == _REBUILD
        ):
            module, _, storage = kind.partition(" ")
            if module != "torch" or storage not in _STORAGES:
                raise ValueError(f"its numbers are of {kind.replace(' ', '.')!r}, which are not floating-point numbers")
            match rest:
                case [int(offset), tuple(shape), tuple(strides), bool(), *_] if len(shape) == len(strides) and all(
                    type(number) is int and number >= 0 for number in (offset, *shape, *strides)
                ):
                    return _Tensor(key, _STORAGES[storage], offset, shape, strides)
    raise ValueError("it holds something else than one tensor")


def _as_floats(raw: bytes, tensor: _Tensor) -> Floats:
    size = int(tensor.dtype[1])
    numbers = np.frombuffer(raw, dtype=f"<{tensor.dtype}", count=len(raw) // size)
    if math.prod(tensor.shape) == 0:
        return np.zeros(tensor.shape, dtype=np.float32)
    last = tensor.offset + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=True))
    # An expanded tensor repeats its numbers: it could be as large as it likes.
    if last >= len(numbers) or math.prod(tensor.shape) > len(numbers):
        raise ValueError("its shape does not fit its numbers")
    strides = [stride * size for stride in tensor.strides]
    view = np.lib.stride_tricks.as_strided(numbers[tensor.offset :], tensor.shape, strides, writeable=False)
    if tensor.dtype == "u2":  # bfloat16: the upper half of a float32
        return np.ascontiguousarray((view.astype(np.uint32) << 16).view(np.float32))
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(view, dtype=np.float32)


class _Description:
    """Reads the operations of a pickle, protocol 2, that `torch.save` writes for a tensor."""

    def __init__(self, code: bytes) -> None:
        self._code, self._place = code, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._operations: dict[bytes, Callable[[], None]] = {
            b"\x80": lambda: self._require(self._number("B") == 2, "protocol"),
            b"c": lambda: self._stack.append(_Global(f"{self._line()} {self._line()}")),
            b"q": lambda: self._remember(self._number("B")),
            b"r": lambda: self._remember(self._number("<I")),
            b"h": lambda: self._recall(self._number("B")),
            b"j": lambda: self._recall(self._number("<I")),
            b"(": lambda: self._marks.append(len(self._stack)),
            b"t": lambda: self._pack(len(self._stack) - self._marks.pop()),
            b")": lambda: self._pack(0),
            b"\x85": lambda: self._pack(1),
            b"\x86": lambda: self._pack(2),
            b"\x87": lambda: self._pack(3),
            b"X": lambda: self._stack.append(self._take(self._number("<I")).decode()),
            b"K": lambda: self._stack.append(self._number("B")),
            b"M": lambda: self._stack.append(self._number("<H")),
            b"J": lambda: self._stack.append(self._number("<i")),
            b"\x8a": lambda: self._stack.append(int.from_bytes(self._take(self._number("B")), "little", signed=True)),
            b"\x88": lambda: self._stack.append(True),
            b"\x89": lambda: self._stack.append(False),
            b"Q": lambda: self._stack.append(_Storage(self._stack.pop())),
            b"R": self._call,
        }

    def value(self) -> Any:
        """What the pickle describes.

        Raises:
            ValueError: it has other operations, or they make no sense.
        """
        try:
            while (operation := self._take(1)) != b".":
                if operation not in self._operations:
                    raise ValueError(f"it holds something else than one tensor (operation {operation!r})")
                self._operations[operation]()
            [value] = self._stack
        except (IndexError, KeyError, UnicodeDecodeError) as error:
            raise ValueError(f"its description is broken: {type(error).__name__}") from None
        return value

    def _take(self, count: int) -> bytes:
        part = self._code[self._place : self._place + count]
        self._require(len(part) == count, "end")
        self._place += count
        return part

    def _number(self, form: str) -> int:
        number: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return number

    def _line(self) -> str:
        end = self._code.index(b"\n", self._place)
        line = self._take(end - self._place).decode()
        self._place += 1
        return line

    def _pack(self, count: int) -> None:
        self._require(0 <= count <= len(self._stack), "stack")
        first = len(self._stack) - count
        self._stack[first:] = [tuple(self._stack[first:])]

    def _call(self) -> None:
        arguments = self._stack.pop()
        self._stack.append(_Call(self._stack.pop(), arguments))

    def _remember(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def _recall(self, place: int) -> None:
        self._stack.append(self._memo[place])

    @staticmethod
    def _require(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"its description is broken: {what}")
