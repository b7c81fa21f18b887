"""Layers whose weights are read from a file in every step have the bits of those that stay in memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from shardline.config.engine import EngineConfig
from shardline.config.fields import format_bytes
from shardline.deployment.deployment import KVAllocation
from shardline.deployment.here import resolve_here
from shardline.engine.executor.base import ExecutorFailure
from shardline.engine.report import startup_report
from shardline.runtime.machines import open_backend
from shardline.runtime.parallel.groups import make_single_rank_groups
from shardline.runtime.worker import Worker
from tests.deployment.machines import machine, resolve_on
from tests.exactness.harness import golden, make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint

GIB = 1 << 30


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("read") / request.param, num_hidden_layers=5)


@pytest.mark.parametrize(
    ("layout", "quantization", "layers"),
    [({}, "none", 3), ({}, "int4", 5), ({"tensor": 2}, "int8", 4)],
)
def test_answers_keep_their_bits(
    model: Path, layout: dict[str, Any], quantization: str, layers: int, tmp_path: Path
) -> None:
    requests = make_requests(256, count=4)
    expected = golden(model, "bfloat16", quantization, "auto", requests)
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization}
    share = _gib_of(model, layers, tensor_parallel_size=layout.get("tensor", 1), **options)
    engine, executor = start_engine(model, **layout, **options, cpu_offload_gb=share, offload_to=str(tmp_path))
    try:
        answers = run(engine, requests, "together")
        again = run(engine, requests, "alone")
    finally:
        engine.close()
        executor.close()
    assert answers == expected
    assert again == expected
    assert list(tmp_path.iterdir()) == []


def _gib_of(model: Path, layers: int, **options: Any) -> float:
    """The part of the weights that these layers have, in GiB."""
    plain = resolve_here(EngineConfig.from_options(model=str(model), cpu_threads=1, **options))
    whole = resolve_here(
        EngineConfig.from_options(model=str(model), cpu_threads=1, cpu_offload_gb=100.0, offload_to="/", **options)
    )
    assert len(whole.offload.layers) == len(plain.spec.layers)
    return whole.weights[0].read_bytes * (layers - 0.5) / len(plain.spec.layers) / GIB


def test_memory_is_that_of_the_layers_that_stay_and_of_two_that_are_read(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "llama", num_hidden_layers=6)
    plain = resolve_here(EngineConfig.from_options(model=str(model)))
    share = _gib_of(model, 4)
    read = resolve_here(EngineConfig.from_options(model=str(model), cpu_offload_gb=share, offload_to=str(tmp_path)))
    assert read.offload.layers == (1, 2, 4, 5)
    (before,), (after,) = plain.weights, read.weights
    assert after.read_bytes == 4 * after.slot_bytes
    assert after.num_bytes == before.num_bytes - 2 * after.slot_bytes


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_report_tells_what_stays_in_memory_from_what_is_read(family: str, tmp_path: Path) -> None:
    wide: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "vocab_size": 64,
    }
    model = make_checkpoint(family, tmp_path / family, num_hidden_layers=6, **wide)
    options: dict[str, Any] = {"model": str(model), "device": "cpu", "cpu_threads": 1, "kv_cache_memory": "8MiB"}
    setup = resolve_here(EngineConfig.from_options(**options, cpu_offload_gb=0.008, offload_to=str(tmp_path)))
    report = Worker(setup, open_backend("cpu", 0, threads=1), make_single_rank_groups()).load()
    (weights,) = setup.weights
    assert report.weight_bytes == pytest.approx(weights.num_bytes, rel=0.02)
    text = "\n".join(startup_report(setup, 0, KVAllocation(2), [report], {}))
    stay, read = format_bytes(report.weight_bytes), format_bytes(weights.read_bytes)
    assert f"weights {stay} in memory and {read} read from {tmp_path}, KV " in text


@pytest.mark.parametrize(("kv", "share"), [("64MiB", 1.0), (None, 0.75)])
def test_without_a_size_layers_are_read_for_which_there_is_no_memory(
    kv: str | None, share: float, tmp_path: Path
) -> None:
    """`share`: of the memory, what weights may have."""
    model = make_checkpoint("llama", tmp_path / "llama", num_hidden_layers=6)
    options: dict[str, Any] = {"model": str(model), "offload_to": str(tmp_path), "kv_cache_memory": kv}
    plain = resolve_on(machine(free_memory=GIB), **options)
    assert not plain.offload.folder
    layer = resolve_on(machine(free_memory=GIB), **options, cpu_offload_gb=1e3).weights[0].slot_bytes

    def layers_with(free_memory: int) -> int:
        return len(resolve_on(machine(free_memory=free_memory), **options).offload.layers)

    least, most = 0, GIB  # all fits into `most`
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if layers_with(middle) else (least, middle)
    assert [layers_with(int(most - missing * layer / share) - 1) for missing in range(4)] == [3, 4, 5, 6]


def test_a_byte_that_changed_on_the_disk_ends_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint("llama", tmp_path / "llama", num_hidden_layers=5)
    requests = make_requests(256, count=2)
    read_at, count = os.preadv, 0

    def lie(descriptor: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        nonlocal count
        done = read_at(descriptor, buffers, offset, *flags)
        count += not flags  # loading reads with flags
        if count >= 12 and not flags:
            buffers[0][100] ^= 1
        return done

    monkeypatch.setattr(os, "preadv", lie)
    engine, executor = start_engine(model, cpu_offload_gb=_gib_of(model, 4), offload_to=str(tmp_path))
    try:
        with pytest.raises((ExecutorFailure, OSError), match="are not what was written"):
            run(engine, requests, "together")
    finally:
        engine.close()
        executor.close()
    assert "read once more" in caplog.text


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "llama", num_hidden_layers=5)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"no file can be made in .*file: "):
        start_engine(model, cpu_offload_gb=_gib_of(model, 4), offload_to=str(tmp_path / "file"))


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wanted is said, and not only what was to be written when the disk was full."""
    room, whole = 200 << 10, r"this rank's 506\.00 KiB of weights"

    def fill(descriptor: int, offset: int, length: int) -> None:
        if offset + length > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = make_checkpoint("llama", tmp_path / "llama", num_hidden_layers=5)
    monkeypatch.setattr(os, "posix_fallocate", fill)
    with pytest.raises(ValueError, match=rf"{whole} cannot be written to .*, only .* KiB: No space left on device"):
        start_engine(model, cpu_offload_gb=_gib_of(model, 4), offload_to=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cpu_offload_gb": -1.0}, "must be a number of GiB"),
        ({"cpu_offload_gb": 1.0}, "needs offload_to"),
        ({"cpu_offload_gb": 1.0, "kernels": "torch"}, "needs offload_to"),
        (
            {"cpu_offload_gb": 1e-6, "offload_to": "/tmp"},
            "^cpu_offload_gb 1e-06 would save nothing: it is 1 of the [0-9]+ layers of a stage, and 2 of those that "
            "are read always have memory; give more than [0-9.]+ .iB$",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        resolve_here(EngineConfig.from_options(model="demo", **options))


@pytest.mark.parametrize(
    ("options", "begins", "ends"),
    [
        ({"cpu_offload_gb": 1.0}, "cpu_offload_gb 1 would", "leave it out"),
        (
            {},
            "offload_to, for the [0-9.]+ .iB of each rank that memory has no room for, would",
            "or set kv_cache_memory",
        ),
        (
            {"kv_cache_memory": "64MiB"},
            "offload_to, for the",
            "use a smaller quantization or model, or use a smaller kv",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_where_nothing_can_be_saved_the_error_names_what_was_given(
    kind: str, options: dict[str, Any], begins: str, ends: str, tmp_path: Path
) -> None:
    layers = 1 if kind == "qwen3_moe" else 2
    model = make_checkpoint(kind, tmp_path / kind, num_hidden_layers=layers)
    with pytest.raises(ValueError, match=rf"^{begins}.* save nothing: .*; .*{ends}") as error:
        resolve_on(machine(free_memory=1 << 20), model=str(model), offload_to=str(tmp_path), **options)
    assert ("cpu_offload_gb" in str(error.value)) == ("cpu_offload_gb" in options)
    if layers == 2:  # of stages that are shorter than the model, fewer may do
        with pytest.raises(ValueError, match="and a stage has 1; use fewer pipeline stages, or"):
            resolve_on(
                machine(free_memory=1 << 20), model=str(model), offload_to="/", pipeline_parallel_size=2, **options
            )


def test_a_draft_model_stays_in_memory(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "llama", num_hidden_layers=5)
    draft = make_checkpoint("llama", tmp_path / "draft", num_hidden_layers=1)
    requests = make_requests(256, count=3)
    expected = golden(model, "float32", "none", "auto", requests)
    engine, executor = start_engine(
        model,
        cpu_offload_gb=_gib_of(model, 4),
        offload_to=str(tmp_path),
        speculative_config={"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2},
    )
    try:
        answers = run(engine, requests, "together")
    finally:
        engine.close()
        executor.close()
    assert answers == expected
