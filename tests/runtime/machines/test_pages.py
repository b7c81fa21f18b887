"""Pages that move keep their bytes, and where they were is memory without pages."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from shardline.runtime.machines.host.pages import can_move, move_pages

PAGE = mmap.PAGESIZE


def test_pages_move_with_their_bytes() -> None:
    memory = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8).reshape(8, PAGE)
    array[:] = np.arange(1, 9)[:, None]
    memory.madvise(mmap.MADV_DONTNEED, 5 * PAGE, 3 * PAGE)
    start = array.ctypes.data
    assert move_pages(start + PAGE, start + 5 * PAGE, 2 * PAGE)
    assert array[:, 0].tolist() == [1, 0, 0, 4, 5, 2, 3, 0]
    assert (array == array[:, :1]).all()
    array[:] = 9  # all of it can be written


def test_what_cannot_move_stays() -> None:
    memory = mmap.mmap(-1, 8 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8).reshape(8, PAGE)
    array[:2] = 7
    start = array.ctypes.data
    assert not move_pages(start + 64, start + 4 * PAGE, PAGE), "a part of a page cannot move"
    assert array[:, 0].tolist() == [7, 7, 0, 0, 0, 0, 0, 0]
    array[:] = 9


def test_pages_do_not_move_where_a_process_would_have_no_mappings_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: "1000\n")
    assert can_move(750)
    assert not can_move(751)
