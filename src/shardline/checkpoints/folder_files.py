"""The files of a model's folder, which somebody else wrote: only regular files, and with limits."""

from __future__ import annotations

import fnmatch
import json
import os
import re
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


_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
_OTHER_SUFFIXES = (".bin", _SUFFIX, ".gguf", ".pth", ".pt", ".incomplete")
_NAMED = 5
_REASONS = {
    "consolidated": "this is Mistral's own format: download the files of the same repository with config.json's names",
    "adapter_": "this is an adapter (LoRA): merge it into its model (in peft: merge_and_unload), and save that",
    ".incomplete": "a download was not finished: run it again",
    ".gguf": "give the GGUF file itself, or leave --load-format out",
}
"""What to do about files that are no checkpoint, by a part of their names."""
_CONVERT = (
    "convert the weights to safetensors (in transformers: model.save_pretrained(folder)), or use load_format dummy"
)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a checkpoint: model.safetensors, or those that an index names, or those that are there.

    Raises:
        ValueError: there are no files, the index is corrupt, files that it names or parts are missing, or files with
            different names may be different checkpoints.
    """
    if (single := folder / _SINGLE).is_file():
        return (single,)
    # Some tools name the index like their files.
    indices = [folder / _INDEX] if (folder / _INDEX).is_file() else sorted(folder.glob(f"*{_SUFFIX}.index.json"))
    return _files_of(indices[0]) if indices else _files_in(folder)


def _files_of(index: Path) -> tuple[Path, ...]:
    """The files that an index names."""
    folder = index.parent
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        files = tuple(folder / name for name in names)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is corrupt: it must be an object with a weight_map of key to file name") from None
    outside = [name for name in names if Path(name).name != name]
    if outside or not files:
        raise ValueError(f"{index} is corrupt: its weight_map must name files beside it, got {outside or 'none'}")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of {len(files)} weight files: {_listed(missing)}; download it again"
        )
    return files


def _files_in(folder: Path) -> tuple[Path, ...]:
    """The files of the one checkpoint in a folder without an index."""
    found = [file for file in sorted(folder.glob(f"*{_SUFFIX}")) if not file.name.startswith((".", *_REASONS))]
    names = [file.name for file in found]
    if not found:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in _OTHER_SUFFIXES)
        reason = next((why for part, why in _REASONS.items() if any(part in name for name in others)), _CONVERT)
        raise ValueError(
            f"{folder} has neither {_SINGLE} nor {_INDEX} "
            f"({f'found only {_listed(others)}' if others else 'found no weights at all'}); {reason}"
        )
    parts = [_PART.search(file.stem) for file in found]
    first = parts[0]
    if first is None and len(found) == 1:
        return tuple(found)
    if first is None or len({part and (part.string[: part.start()], part[2]) for part in parts}) > 1:
        raise ValueError(
            f"{folder} has {_listed(names)}, and no {_INDEX} says which of them are the model; download the index, or "
            "keep the files of one model"
        )
    count = int(first[2])
    there = {int(part[1]) for part in parts if part is not None}
    missing = [number for number in range(1, min(count, 100_000) + 1) if number not in there]
    if missing:
        wanted = [f"{first.string[: first.start()]}-{number:05}-of-{count:05}{_SUFFIX}" for number in missing]
        raise ValueError(f"{folder} lacks {len(missing)} of {count} weight files: {_listed(wanted)}; download it again")
    return tuple(found)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
