"""What a node reads before its ranks need it: all bytes of their tensors, each once, and no others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.models.checkpoint import Checkpoint
from shardline.models.gguf.checkpoint import GGUFCheckpoint
from shardline.runtime.loader import page_cache
from shardline.runtime.loader.read_ahead import FileRange, node_ranges, read_ahead
from tests.models.checkpoints import make_checkpoint

from .gguf_writer import mixed, write_gguf


def bytes_of(ranges: list[FileRange]) -> int:
    for one in ranges:
        assert not any(
            one.file == other.file and one.start < other.stop <= one.stop for other in ranges if other != one
        )
    return sum(one.stop - one.start for one in ranges)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss"])
def test_all_tensors_are_read(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path / "model", max_shard_size="100KB")
    deployment = resolve_here(EngineConfig.from_options(model=str(folder)))
    tensors = Checkpoint.open(folder).tensors.values()
    # Neighbours are joined over the padding between them.
    assert bytes_of(node_ranges(deployment, 0, 0)) >= sum(entry.num_bytes for entry in tensors)


def test_all_tensors_of_a_gguf_file_are_read(tmp_path: Path) -> None:
    source = make_checkpoint("deepseek_v3", tmp_path / "model")
    write_gguf(source, tmp_path / "x.gguf", mixed(Type.Q8_0), split_latents=True)
    deployment = resolve_here(EngineConfig.from_options(model=str(tmp_path / "x.gguf")))
    tensors = GGUFCheckpoint.open(tmp_path / "x.gguf").tensors.values()
    assert bytes_of(node_ranges(deployment, 0, 0)) >= sum(tensor.num_bytes for tensor in tensors)


def test_random_weights_are_not_read() -> None:
    deployment = resolve_here(EngineConfig.from_options(model="demo", load_format="dummy"))
    assert node_ranges(deployment, 0, 0) == []


def test_ranges_are_read_in_order_as_ranks_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, copied = tmp_path / "file", 0.0
    read: list[tuple[int, int]] = []
    file.write_bytes(os.urandom(1 << 16))
    monkeypatch.setattr("shardline.runtime.loader.read_ahead._LEAD", 0)
    monkeypatch.setattr("shardline.runtime.loader.read_ahead._SECONDS", 0.001)
    monkeypatch.setattr("shardline.runtime.loader.read_ahead.fetch", lambda _, start, size: read.append((start, size)))

    def grow() -> float:
        nonlocal copied
        copied += 0.01
        return copied

    ranges = [FileRange(file, 4096, 8192), FileRange(file, 0, 4096), FileRange(tmp_path / "missing", 0, 1)]
    with read_ahead(ranges, grow):
        while len(read) < 2:
            time.sleep(0.001)
    assert read == [(4096, 4096), (0, 4096)]


def test_parts_of_files(tmp_path: Path) -> None:
    file, content = tmp_path / "file", os.urandom(1 << 16)
    file.write_bytes(content)
    for offset, size in ((0, 1), (3, 5000), (4095, 2), (5000, (1 << 16) - 5000)):
        with file.open("rb") as opened:
            page_cache.fetch(opened.fileno(), offset, size)
        assert bytes(page_cache.map_part(file, offset, size).numpy()) == content[offset : offset + size]
