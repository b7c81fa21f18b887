"""What a node reads before its ranks need it: all bytes of their tensors, each once, and no others."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from shardline.checkpoints.checkpoint import Checkpoint
from shardline.checkpoints.gguf.checkpoint import GGUFCheckpoint
from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.kernels import page_cache
from shardline.runtime.loader.progress import LoadingLine
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


def test_the_line_shows_how_far_weights_are_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadingLine(8_500_000_000, shown=True) as line:
        line.count(3_145_000_000)
        time.sleep(0.15)
        line.refresh()
        line.count(5_400_000_000)
        line.refresh()
    shown = capsys.readouterr().err
    assert re.search(r"\rLoading weights: 37% \| 3\.1/8\.5 GB \| \d+\.\d\d GB/s \| \d+ s left", shown)
    assert re.search(r"\rLoading weights: 100% \| 8\.5/8\.5 GB \| \d+\.\d\d GB/s \| 0 s left", shown)


def test_parts_of_files(tmp_path: Path) -> None:
    file, content = tmp_path / "file", os.urandom(1 << 16)
    file.write_bytes(content)
    for offset, size in ((0, 1), (3, 5000), (4095, 2), (5000, (1 << 16) - 5000)):
        with file.open("rb") as opened:
            page_cache.fetch(opened.fileno(), offset, size)
        assert bytes(page_cache.map_part(file, offset, size).numpy()) == content[offset : offset + size]


def test_rows_of_a_large_part_come_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "CHUNK", 4096)
    monkeypatch.setattr(page_cache, "_SLICE", 1 << 15)
    file, content = tmp_path / "file", os.urandom((1 << 18) + 5000)
    file.write_bytes(content)
    part = page_cache.map_part(file, 5000, 1 << 18).view(512, 512)
    copy = torch.zeros(512, 512, dtype=torch.uint8)
    for _ in range(2):  # pages that were given back are the file's again
        assert bytes(page_cache.copy_rows(part, copy).numpy()) == content[5000 : 5000 + (1 << 18)]
    for tensor in (part, part[100:], part[:200:3], part[:, 50:60]):
        rows = [some.clone() for some in page_cache.row_slices(tensor)]
        assert len(rows) == -(-len(tensor) // 64)
        assert torch.equal(torch.cat(rows), tensor)
    for whole in (copy, part.T, part.flatten()):
        assert len(list(page_cache.row_slices(whole))) == 1
