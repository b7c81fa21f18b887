"""Tensors from files of torch.save, and files that are none."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shardline.checkpoints.torch_file import read_torch_tensor


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def with_entry(content: bytes, name: str, entry: bytes, **options: Any) -> bytes:
    """The archive with another content of one entry."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as before, zipfile.ZipFile(buffer, "w", **options) as after:
        for info in before.infolist():
            after.writestr(info.filename, entry if info.filename.endswith(name) else before.read(info))
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "view",
    [lambda x: x, lambda x: x.t(), lambda x: x[1:, ::2], lambda x: x[None], lambda x: x[:0], lambda x: x[2]],
    ids=["whole", "transposed", "strided", "batch", "empty", "one row"],
)
def test_tensors_come_as_torch_has_them(dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = view(torch.randn(5, 6).to(dtype))
    assert np.array_equal(read_torch_tensor(saved(tensor)), tensor.float().numpy())


class Runs:
    """What an attacker would send."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


def test_no_code_of_a_file_runs(tmp_path: Any) -> None:
    target = tmp_path / "made"
    code = pickle.dumps(Runs(str(target)), protocol=2)
    with pytest.raises(ValueError, match="something else than one tensor"):
        read_torch_tensor(with_entry(saved(torch.zeros(1)), "data.pkl", code))
    assert not target.exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no file of torch.save"),
        (b"PK\x03\x04 and so on", "no file of torch.save"),
        (saved([torch.zeros(1)]), "something else than one tensor"),
        (saved({"a": torch.zeros(1)}), "something else than one tensor"),
        (saved(torch.zeros(2, dtype=torch.int64)), "LongStorage"),
        (saved(torch.eye(3).to_sparse_coo()), "something else|sparse"),
        (saved(torch.zeros(1).expand(1 << 40)), "does not fit its numbers"),
        (with_entry(saved(torch.zeros(100)), "data/0", b"abcd"), "does not fit its numbers"),
        (with_entry(saved(torch.zeros(100)), "byteorder", b"big"), "big-endian"),
        (with_entry(saved(torch.zeros(100)), "x", b"", compression=zipfile.ZIP_DEFLATED), "compressed"),
        (with_entry(saved(torch.zeros(1)), "data.pkl", b"\x80\x02" + b"(" * 5000 + b"."), "one tensor"),
        (with_entry(saved(torch.zeros(1)), "data.pkl", b"\x80\x02t."), "broken"),
        (with_entry(saved(torch.zeros(1)), "data.pkl", b"\x80\x02X\xff\xff\xff\xffab"), "broken: end"),
    ],
)
def test_what_is_no_tensor_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_torch_tensor(content)


def test_a_damaged_file_is_an_error_and_nothing_else() -> None:
    whole = saved(torch.randn(3, 4))
    for place in range(0, len(whole), 7):
        damaged = whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :]
        with contextlib.suppress(ValueError):
            read_torch_tensor(damaged)
