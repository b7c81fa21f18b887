"""Experts that are read from a file when tokens choose them have the bits of those that stay in memory."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.engine.executor.base import ExecutorFailure
from shardline.kernels.host.memory import streamed_empty
from shardline.runtime.machines.host import expert_stream
from shardline.runtime.machines.host.expert_stream import ExpertStream
from tests.exactness.harness import golden, make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint

GIB = 1 << 30


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("read") / request.param, num_hidden_layers=5)


@pytest.mark.parametrize(
    ("layout", "quantization"),
    [
        ({}, "int4"),
        ({"tensor": 2}, "int8"),
        ({"tensor": 2, "pipeline": 2}, "none"),
        ({"tensor": 2, "enable_expert_parallel": True}, "none"),
    ],
)
def test_answers_keep_their_bits(model: Path, layout: dict[str, Any], quantization: str, tmp_path: Path) -> None:
    requests = make_requests(256, count=4)
    expected = golden(model, "bfloat16", quantization, "auto", requests)
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization}
    engine, executor = start_engine(model, **layout, **options, cpu_offload_gb=100.0, offload_to=str(tmp_path))
    try:
        answers = run(engine, requests, "together")
        again = run(engine, requests, "alone")
    finally:
        engine.close()
        executor.close()
    assert answers == expected
    assert again == expected
    assert list(tmp_path.iterdir()) == []


def test_memory_is_that_of_the_experts_that_stay(model: Path, tmp_path: Path) -> None:
    plain = resolve_here(EngineConfig.from_options(model=str(model)))
    (before,) = plain.weights

    def read(share: float) -> Any:
        options = {"model": str(model), "cpu_offload_gb": share, "offload_to": str(tmp_path)}
        return resolve_here(EngineConfig.from_options(**options))

    most = read(100.0)
    (least,) = most.weights
    assert least.kept_expert_bytes == least.expert_layer_bytes
    assert least.read_bytes == (len(most.offload.expert_layers) - 1) * least.expert_layer_bytes
    assert least.num_bytes == before.num_bytes - least.read_bytes
    (some,) = read(least.read_bytes / 2 / GIB).weights
    assert some.num_bytes == before.num_bytes - least.read_bytes // 2
    assert some.loaded_bytes == before.num_bytes


def test_a_model_with_experts_in_one_layer_is_refused(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_moe", tmp_path / "model", num_hidden_layers=1)
    with pytest.raises(ValueError, match="would save nothing: no rank has experts of more than one layer"):
        resolve_here(EngineConfig.from_options(model=str(model), cpu_offload_gb=1.0, offload_to=str(tmp_path)))


def test_a_byte_that_changed_on_the_disk_ends_the_rank(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read_at, lies = os.preadv, False

    def lie(descriptor: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        done = read_at(descriptor, buffers, offset, *flags)
        if lies and not flags:
            buffers[0][100] ^= 1
        return done

    monkeypatch.setattr(os, "preadv", lie)
    engine, executor = start_engine(model, cpu_offload_gb=100.0, offload_to=str(tmp_path))
    lies = True
    try:
        with pytest.raises((ExecutorFailure, OSError), match="are not what was written"):
            run(engine, make_requests(256, count=2), "together")
    finally:
        engine.close()
        executor.close()
    assert "read once more" in caplog.text


ROWS, COLUMNS = 24, 2000  # no expert ends with a page
EXPERT_BYTES = 2 * 4 * ROWS * COLUMNS // 2


def open_stream(
    folder: Path, num_layers: int, num_experts: int, kept: int
) -> tuple[ExpertStream, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A stream with room for `kept` experts, and the panels of its layers; expert e of layer n holds 1000 n + e."""
    stream = ExpertStream(folder, kept * EXPERT_BYTES, num_experts * EXPERT_BYTES, num_layers)
    layers = []
    for layer in range(num_layers):
        with stream.loading():
            panels = [streamed_empty((num_experts, ROWS // 2, COLUMNS), torch.float32) for _ in range(2)]
        for expert in range(num_experts):
            for part in panels:
                part[expert] = 1000 * layer + expert
        stream.keep(layer, panels, 0)
        layers.append((panels[0], panels[1]))
    return stream, layers


def resident_bytes(panels: torch.Tensor) -> int:
    """Bytes of the pages of a tensor that are in memory."""
    first, last = panels.data_ptr() // 4096, (panels.data_ptr() + panels.nbytes - 1) // 4096
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * first)
        entries = np.frombuffer(pagemap.read(8 * (last - first + 1)), dtype=np.uint64)
    return 4096 * int((entries >> np.uint64(63)).sum())


@pytest.fixture(params=[True, False], ids=["moved", "given back"])
def pages_move(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of an expert that leaves move to the next one, or the system cannot do this."""
    if not request.param:
        monkeypatch.setattr(expert_stream, "move_pages", lambda *_: False)


@pytest.mark.usefixtures("pages_move")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_was_chosen_is_there_and_the_rest_takes_no_memory(data: st.DataObject, tmp_path_factory: Any) -> None:
    num_layers, num_experts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    kept = data.draw(st.integers(0, num_layers * num_experts))
    stream, layers = open_stream(tmp_path_factory.mktemp("experts"), num_layers, num_experts, kept)
    room = max(kept, num_experts)
    for _ in range(data.draw(st.integers(1, 5))):
        for layer, panels in enumerate(layers):
            ids = torch.tensor(data.draw(st.lists(st.integers(0, num_experts + 1), max_size=8)), dtype=torch.int32)
            stream.acquire(layer, ids, first=1)
            for expert in {number - 1 for number in ids.tolist() if 1 <= number <= num_experts}:
                for part in panels:
                    assert torch.all(part[expert] == 1000 * layer + expert)
            pages = sum(resident_bytes(part) for both in layers for part in both)
            # Beside those that stay, the pages at the ends of experts.
            assert pages <= room * EXPERT_BYTES + len(layers) * 2 * (num_experts + 1) * 4096


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the reads so far."""
    read_at, reads = os.preadv, []

    def count(*arguments: Any) -> int:
        reads.append(arguments)
        return read_at(*arguments)

    monkeypatch.setattr(os, "preadv", count)
    return lambda: len(reads)


def test_an_expert_that_could_not_be_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, [panels] = open_stream(tmp_path, num_layers=1, num_experts=4, kept=4)
    ids = torch.tensor([2], dtype=torch.int32)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(OSError, match="end early"):
            stream.acquire(0, ids, 0)
    stream.acquire(0, ids, 0)
    assert all(bool(torch.all(part[2] == 2)) for part in panels)


def test_experts_that_are_often_chosen_stay(tmp_path: Path, counted: Callable[[], int]) -> None:
    stream, _ = open_stream(tmp_path, num_layers=2, num_experts=8, kept=8)
    hot = torch.tensor([0, 1, 2], dtype=torch.int32)
    random = np.random.default_rng(0)

    def step() -> None:
        for layer in range(2):
            other = torch.tensor([random.integers(3, 8)], dtype=torch.int32)
            stream.acquire(layer, torch.cat([hot, other]), 0)

    for _ in range(20):
        step()
    before = counted()
    for _ in range(100):
        step()
    assert counted() - before <= 100 * 2 * 2 * 0.9  # at most one expert a layer, of two parts


def test_in_a_circle_what_is_needed_last_leaves_first(
    tmp_path: Path, counted: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stream, _ = open_stream(tmp_path, num_layers=6, num_experts=4, kept=16)
    all_ids = torch.arange(4, dtype=torch.int32)
    for _ in range(3):
        for layer in range(6):
            stream.acquire(layer, all_ids, 0)
    before = counted()
    for _ in range(14):
        for layer in range(6):
            stream.acquire(layer, all_ids, 0)
    # Beside the layer that computes, 3 of the other 5 stay, or 2 while the next one is read ahead; if the least
    # recently used ones left, all six layers would be read.
    assert (counted() - before) / 14 <= 2 * 4 * 3.7
    assert "16 steps: each read" in caplog.text


def test_while_a_layer_computes_as_much_is_read_as_there_is_time_for(
    tmp_path: Path, counted: Callable[[], int]
) -> None:
    stream, _ = open_stream(tmp_path, num_layers=4, num_experts=8, kept=20)
    all_ids = torch.arange(8, dtype=torch.int32)
    shares = []
    for _ in range(8):
        begun, early = counted(), 0
        for layer in range(4):
            last = counted()
            time.sleep(0.03)
            early += counted() - last
            stream.acquire(layer, all_ids, 0)
        shares.append(early / (counted() - begun))
    # One step that a busy machine does not disturb is enough.
    assert max(shares[1:]) > 0.4


@pytest.mark.parametrize("held", [0, 7, 8])
def test_what_computes_in_other_memory_is_not_read_ahead(held: int, tmp_path: Path, counted: Callable[[], int]) -> None:
    stream, _ = open_stream(tmp_path, num_layers=2, num_experts=8, kept=16)
    stream.held_elsewhere = lambda layer: np.arange(8) < held
    before = counted()
    stream.acquire(0, torch.arange(8, dtype=torch.int32), 0)
    stream.acquire(1, torch.tensor([], dtype=torch.int32), 0)  # waits for what was read ahead
    ahead = (counted() - before - 2 * 8) / 2
    assert ahead == 8 - held if held >= 7 else ahead > 0
