"""Files of a model's folder that are no files, too large or nested too deep: each is named, and nothing waits."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardline.checkpoints.folder_files import MAX_JSON_DEPTH, read_bytes, read_json
from shardline.checkpoints.hub import DEMO_FOLDER, resolve_model, resolve_tokenizer
from shardline.text.chat_template import ChatTemplate
from shardline.text.tokenizer import Tokenizer

JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
OTHER_FILES = ("tokenizer.json", "chat_template.jinja", "model.safetensors", "model.safetensors.index.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, copy)
    return copy


def load(folder: Path) -> None:
    """Everything that is read before an engine starts."""
    files = resolve_model(str(folder))
    assert isinstance(files.eos_token_ids, tuple)
    read_text(folder)


def read_text(folder: Path) -> None:
    Tokenizer.from_folder(folder)
    ChatTemplate.from_folder(folder)


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket must be short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (os.mkfifo, "is a FIFO"),
    "folder": (Path.mkdir, "is a folder"),
    "socket": (make_socket, "is a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*JSON_FILES, *OTHER_FILES])
def test_only_regular_files_are_read(folder: Path, name: str, kind: str) -> None:
    make, message = KINDS[kind]
    path = folder / name
    path.unlink(missing_ok=True)
    make(path)
    started = time.monotonic()
    with pytest.raises(ValueError, match=f"{name} {message}, not a regular file"):
        load(folder)
    if name not in ("model.safetensors", "model.safetensors.index.json", "config.json"):
        with pytest.raises(ValueError, match=f"{name} {message}, not a regular file"):
            resolve_tokenizer(str(folder))
    assert time.monotonic() - started < 5


def test_links_to_files_and_folders_of_other_things_are_taken(folder: Path) -> None:
    (folder / "config.json").rename(folder / "blob")
    (folder / "config.json").symlink_to("blob")
    (folder / "tokenizer").mkdir()
    (folder / "vocab.json").symlink_to("nowhere")
    load(folder)


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize("name", JSON_FILES)
def test_files_that_are_nested_too_deep(folder: Path, name: str, depth: int) -> None:
    path = folder / name
    values = json.loads(path.read_text()) if path.exists() else {}
    own = json.dumps(values)[:-1] + (", " if values else "")
    path.write_text(own + '"nested": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}")
    started = time.monotonic()
    with pytest.raises(ValueError, match=f"{name} is nested deeper than {MAX_JSON_DEPTH} levels"):
        load(folder)
    assert time.monotonic() - started < 5


def test_the_deepest_file_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text('{"a": ' + "[" * (MAX_JSON_DEPTH - 1) + "]" * (MAX_JSON_DEPTH - 1) + "}")
    assert "a" in read_json(path)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors.index.json"])
def test_other_files_that_are_nested_too_deep(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_text('{"weight_map": ' + '{"a": ' * 100_000 + "1" + "}" * 100_001)
    with pytest.raises(ValueError, match=name):
        load(folder) if name != "tokenizer.json" else read_text(folder)


def test_files_that_are_too_large(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    for read in (read_json, lambda path: read_bytes(path, 1000)):
        with pytest.raises(ValueError, match=r"config\.json has 1099511627776 bytes; at most"):
            read(path)
    path.write_text('{"a": [' + "[]," * 4_000_000 + "1]}")
    with pytest.raises(ValueError, match=r"config\.json has more than 4000000 values"):
        read_json(path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ['"a"', "[[1]]", "-1", "1e400", "NaN", "true", '{"a": 1}', "9" * 4000])
def test_wrong_token_ids(folder: Path, name: str, value: str) -> None:
    if name == "config.json":
        (folder / "generation_config.json").unlink(missing_ok=True)
    values = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    values.pop("eos_token_id", None)
    (folder / name).write_text(json.dumps(values)[:-1] + (", " if values else "") + f'"eos_token_id": {value}}}')
    with pytest.raises(ValueError, match="eos_token_id must be a token id"):
        load(folder)
    with pytest.raises(ValueError, match=f"{name}: eos_token_id must be a token id"):
        read_text(folder)


@pytest.mark.parametrize("value", [[1], [{}], [{"name": "a"}]])
def test_wrong_chat_templates(folder: Path, value: object) -> None:
    for path in folder.glob("chat_template*"):
        path.unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ValueError, match="must have a name and a template"):
        read_text(folder)
