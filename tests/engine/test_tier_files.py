"""What an engine knows of files that ranks, and other servers, write and remove."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from shardline.deployment.block_folder import KEY_BYTES, block_path
from shardline.engine.tier_files import FileIndex

KEYS = [bytes([number]) * KEY_BYTES for number in range(3)]


def write(folder: Path, key: bytes) -> Path:
    path = block_path(folder, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_it_follows_the_folder(tmp_path: Path) -> None:
    index = FileIndex(tmp_path / "blocks")
    assert len(index) == 0
    index.add(KEYS[0])
    index.update()
    assert KEYS[0] in index, "its file is still being written"
    first = write(tmp_path / "blocks", KEYS[0])
    write(tmp_path / "blocks", KEYS[1])
    (first.parent / "7-1.part").touch()
    (tmp_path / "blocks" / "other").touch()
    index.update()
    assert [key in index for key in KEYS] == [True, True, False]
    assert len(index) == 2
    index.discard(KEYS[1])
    index.discard(KEYS[2])
    assert KEYS[1] not in index
    first.unlink()
    index.update()
    assert KEYS[0] not in index
    index.close()
    again = FileIndex(tmp_path / "blocks")
    assert [key in again for key in KEYS] == [False, True, False]
    again.close()


def test_only_subfolders_that_have_changed_are_listed_again(tmp_path: Path) -> None:
    path = write(tmp_path, KEYS[0])
    os.utime(path.parent, ns=(0, 5))
    index = FileIndex(tmp_path)
    index.discard(KEYS[0])
    index.update()
    assert KEYS[0] not in index
    os.utime(path.parent)
    index.update()
    assert KEYS[0] in index
    index.close()


def test_its_thread_ends_with_it(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    index = FileIndex(tmp_path)
    (thread,) = set(threading.enumerate()) - before
    index.close()
    thread.join(30)
    assert not thread.is_alive()


def test_it_has_what_any_of_several_ranks_has(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    write(folders[0], KEYS[0])
    index = FileIndex(*folders)
    index.add(KEYS[1])
    write(folders[1], KEYS[1])
    index.update()
    assert [key in index for key in KEYS] == [True, True, False]
    for key in KEYS:
        index.discard(key)
    assert not any(key in index for key in KEYS)
    index.close()
