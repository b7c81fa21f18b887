"""Reading the files of a model's folder, which somebody else wrote: only regular files, and with limits."""

from __future__ import annotations

import fnmatch
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 64 << 20
MAX_JSON_VALUES = 4_000_000
MAX_JSON_DEPTH = 64
MAX_TOKENIZER_BYTES = 512 << 20
_MAX_TEXT_BYTES = 16 << 20
_POINTER = b"version https://git-lfs"
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def require_regular_files(folder: Path, patterns: Sequence[str]) -> None:
    """Look at the files whose names match `patterns`, before anything reads them.

    Raises:
        ValueError: one is a FIFO, a device or something else that is no file; reading it might never end.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if not any(fnmatch.fnmatch(entry.name, pattern) for pattern in patterns):
                continue
            path = Path(entry.path)
            try:
                mode = path.stat().st_mode
            except FileNotFoundError:  # a link to what is not there
                continue
            except OSError as error:
                raise ValueError(f"{path} cannot be read: {error.strerror}") from error
            if not stat.S_ISREG(mode) and not (stat.S_ISDIR(mode) and not path.suffix):
                _require_regular(path, mode)


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        ValueError: it is larger, no regular file, or its content cannot be read.
        OSError: it is missing, or it cannot be opened.
    """
    # With O_NONBLOCK, a FIFO without a writer opens at once.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        status = os.fstat(stream.fileno())
        _require_regular(path, status.st_mode)
        if status.st_size > most:
            raise ValueError(f"{path} has {status.st_size} bytes; at most {most} are read")
        try:
            return stream.read(most)
        except OSError as error:  # a link into /proc, or a broken disk
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def read_text(path: Path) -> str:
    """A text of a model's author, such as a chat template; see `read_bytes`."""
    try:
        return read_bytes(path, _MAX_TEXT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: the file is no JSON object, or larger or nested deeper than any model's; see `read_bytes`.
    """
    data = read_bytes(path, MAX_JSON_BYTES)
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_JSON_VALUES:
        raise ValueError(f"{path} has more than {MAX_JSON_VALUES} values")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(f"{path} is nested deeper than {MAX_JSON_DEPTH} levels") from None
    except ValueError as error:
        raise ValueError(f"{path} is corrupt: {not_itself(path) or error}; download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is corrupt: it must hold an object, not {type(value).__name__}; download it again")
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        inner = (item for one in level for item in (one.values() if isinstance(one, dict) else one))
        level = [item for item in inner if isinstance(item, (dict, list))]
    if level:
        raise ValueError(f"{path} is nested deeper than {MAX_JSON_DEPTH} levels")
    return value


def read_token_ids(value: Any, source: object) -> tuple[int, ...]:
    """The token ids in a file of `source`: none, one or a list of them.

    Raises:
        ValueError: it is something else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and 0 <= token_id < 1 << 31 for token_id in ids):
        raise ValueError(f"{source}: eos_token_id must be a token id or a list of them, got {value!r:.80}")
    return tuple(ids)


def not_itself(file: Path) -> str:
    """What a corrupt file is, if it was never the file itself; empty: nothing known."""
    with file.open("rb") as stream:
        begin = stream.read(64)
    if begin.startswith(_POINTER):
        return "a Git LFS pointer, not the file itself, which `git lfs pull` gets"
    if begin.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "a web page, not the file itself"
    return ""


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise ValueError(f"{path} is {kind}, not a regular file; download it again")
