"""Weights that are copied to a device, from host memory or from files behind it, have the bits of those that stay.

The device is a CPU here, whose memory counts as none of the host's; so what a GPU would find in host memory is given.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardline.config.engine import EngineConfig
from shardline.deployment import weight_offload
from shardline.deployment.deployment import LAYER_SLOTS, Deployment, FixedPool
from shardline.deployment.here import resolve_here
from shardline.deployment.machine import Machine
from shardline.engine.executor.base import ExecutorFailure
from shardline.kernels import memory
from shardline.kernels.torch.torch_kernels import TorchKernels
from shardline.messages.request import Request
from shardline.runtime.machines.host.expert_stream import ExpertStream
from shardline.runtime.machines.torch import host_memory
from shardline.runtime.machines.torch.expert_stream import DeviceExpertStream
from shardline.runtime.machines.torch.host_memory import HostRows
from shardline.runtime.machines.torch.weight_stream import DeviceWeightStream
from tests.deployment.machines import gpu, host, machine, resolve_on
from tests.exactness.harness import Answer, make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint

GIB = 1 << 30
EVERYTHING = 1 << 40


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("copied")
    families = ("llama", "qwen3_moe", "deepseek_v3")
    return {family: make_checkpoint(family, folder / family, num_hidden_layers=6) for family in families}


def answers(model: Path, requests: list[Request], batch: str, **options: Any) -> dict[str, Answer]:
    engine, executor = start_engine(model, kernels="torch", **options)
    try:
        return run(engine, requests, batch)
    finally:
        engine.close()
        executor.close()


def have_host_memory(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """A rank may have so many bytes of weights in host memory."""

    def rooms(config: EngineConfig, layout: Any, where: object) -> list[int]:
        return [room] * int(layout.grid.world_size)

    monkeypatch.setattr(weight_offload, "_host_rooms", rooms)


def resolved(model: Path, **options: Any) -> Deployment:
    return resolve_here(EngineConfig.from_options(model=str(model), kernels="torch", cpu_threads=1, **options))


@pytest.mark.parametrize(
    ("family", "dtype", "quantization", "layout", "layers_on_host"),
    [
        ("llama", "bfloat16", "none", {}, 6),
        ("llama", "float32", "none", {"tensor": 2}, 2),
        ("llama", "bfloat16", "int8", {"pipeline": 2}, 0),
        ("llama", "bfloat16", "fp8", {}, 3),
        ("qwen3_moe", "bfloat16", "none", {"tensor": 2}, 6),
        ("qwen3_moe", "bfloat16", "int4_fast", {"lockstep": 2, "enable_expert_parallel": True}, 3),
        ("deepseek_v3", "float32", "none", {}, 0),
    ],
)
def test_answers_keep_their_bits(
    models: dict[str, Path],
    family: str,
    dtype: str,
    quantization: str,
    layout: dict[str, Any],
    layers_on_host: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "_LARGEST", 1 << 13)  # several pieces
    monkeypatch.setattr(host_memory, "_SMALLEST", 1 << 10)
    requests, options = make_requests(256, 4), {"dtype": dtype, "quantization": quantization}
    expected = answers(models[family], requests, "alone", **options)
    elsewhere: dict[str, Any] = {"cpu_offload_gb": 100.0, "offload_to": str(tmp_path)}
    if layers_on_host:
        elsewhere_on = {**options, **elsewhere, "tensor_parallel_size": layout.get("tensor", 1)}
        whole = resolved(models[family], **elsewhere_on).weights[0]
        layer = whole.expert_layer_bytes or whole.slot_bytes
        # Where some layers lie in files, two of them pass through memory.
        places = layers_on_host + 2 * (layers_on_host < 6 and not whole.expert_layer_bytes)
        have_host_memory(monkeypatch, EVERYTHING if layers_on_host == 6 else places * layer)
        if family == "llama":
            assert len(resolved(models[family], **elsewhere_on).offload.host_layers) == layers_on_host
    assert answers(models[family], requests, "together", **options, **layout, **elsewhere) == expected
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_was_chosen_is_there(data: st.DataObject, tmp_path_factory: Any) -> None:
    num_layers, num_experts = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    kernels, columns = TorchKernels(torch.device("cpu")), 1000
    rows = data.draw(st.lists(st.sampled_from([1, 3]), min_size=num_layers, max_size=num_layers))
    sizes = [2 * -(-own * columns * 4 // 256) * 256 for own in rows]
    kept, in_file = data.draw(st.integers(0, num_experts * sum(sizes))), data.draw(st.booleans())
    files = None
    if in_file:
        held = data.draw(st.integers(0, num_experts * sum(sizes)))
        files = ExpertStream(tmp_path_factory.mktemp("experts"), held, num_experts * max(sizes), num_layers)
    stream = DeviceExpertStream(kernels, kept, num_layers, files)
    layers = []
    for layer, own in enumerate(rows):
        with stream.loading():
            panels = [torch.empty(num_experts, own, columns) for _ in range(2)]
        for expert in range(num_experts):
            for sign, part in zip((1, -1), panels, strict=True):
                part[expert] = sign * (1000 * layer + expert)
        stream.keep(layer, panels, 0)
        layers.append(panels)
    places = sum(place.nbytes for free in stream._free.values() for place in free)
    assert num_experts * sum(set(sizes)) <= places <= max(kept, num_experts * sum(set(sizes)))
    for _ in range(data.draw(st.integers(1, 5))):
        for layer, panels in enumerate(layers):
            ids = torch.tensor(data.draw(st.lists(st.integers(0, num_experts + 1), max_size=8)), dtype=torch.int32)
            stream.acquire(layer, ids, first=1)
            for expert in {number - 1 for number in ids.tolist() if 1 <= number <= num_experts}:
                for sign, part in zip((1, -1), panels, strict=True):
                    found = kernels.copied_experts[part][expert]
                    assert found is not None
                    assert torch.all(found == sign * (1000 * layer + expert))
        there = [part for panels in layers for part in kernels.copied_experts[panels[0]] if part is not None]
        assert len({part.data_ptr() for part in there}) == len(there)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_byte_that_changed_on_the_disk_ends_the_rank(
    models: dict[str, Path], family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_at, lies = os.preadv, False

    def lie(descriptor: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        done = read_at(descriptor, buffers, offset, *flags)
        if lies and not flags:
            buffers[0][100] ^= 1
        return done

    monkeypatch.setattr(os, "preadv", lie)
    engine, executor = start_engine(
        models[family], kernels="torch", cpu_offload_gb=100.0, offload_to=str(tmp_path), enable_prefix_caching=False
    )
    lies = True
    try:
        with pytest.raises((ExecutorFailure, OSError), match="are not what was written"):
            run(engine, make_requests(256, count=2), "together")
    finally:
        engine.close()
        executor.close()


def on_gpus(model: Path, *, free: int = GIB, gpus: int = 1, memory: int = 64 * GIB, **options: Any) -> Deployment:
    where = machine(*[(GIB, free)] * gpus, free_memory=memory)
    return resolve_on(where, model=str(model), device="cuda", **{"kernels": "torch", **options})


def test_weights_of_gpus_lie_in_host_memory_first(models: dict[str, Path], tmp_path: Path) -> None:
    model = models["llama"]
    (whole,) = on_gpus(model).weights
    away = on_gpus(model, cpu_offload_gb=100.0)
    (weights,) = away.weights
    assert away.offload.folder == ""
    assert away.offload.host_layers == away.offload.layers == tuple(range(6))
    assert weights.host_bytes == weights.read_bytes == 6 * weights.slot_bytes
    assert weights.num_bytes == whole.num_bytes - 4 * weights.slot_bytes
    assert away.file_bytes == 0

    # A host with room for some of them reads the others from files, two of which pass through memory.
    process = weight_offload._PROCESS_BYTES
    memory = int((process + 5.5 * weights.slot_bytes) / weight_offload._HOST_SHARE)
    some = on_gpus(model, cpu_offload_gb=100.0, offload_to=str(tmp_path), memory=memory)
    assert (some.offload.folder, some.offload.host_layers) == (str(tmp_path), (1, 3, 5))
    assert some.weights[0].host_bytes == some.file_bytes == 3 * weights.slot_bytes
    with pytest.raises(ValueError, match=r"node needs .* of memory for the weights .* lower cpu_offload_gb, or name"):
        on_gpus(model, cpu_offload_gb=100.0, memory=memory)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_without_a_size_what_a_gpu_has_no_room_for_is_away(models: dict[str, Path], kind: str, tmp_path: Path) -> None:
    assert on_gpus(models[kind], offload_to=str(tmp_path)).offload == resolved(models[kind]).offload
    (plain,) = on_gpus(models[kind]).weights
    reserved = GIB - int(GIB * 0.92)  # by the default of --gpu-memory-utilization

    def away_with(free: int) -> int:
        """How many bytes are away; zero also if even that does not help."""
        with contextlib.suppress(ValueError):
            return on_gpus(models[kind], free=free, offload_to=str(tmp_path), max_model_len=64).weights[0].read_bytes
        return 0

    step = plain.num_bytes // 20
    found = [away_with(reserved + free) for free in range(step, 40 << 20, step)]
    assert 0 < max(found) < plain.num_bytes
    assert found[-1] == 0
    some = [away for away in found if away]
    assert some == sorted(some, reverse=True), "the more memory, the less is away"


def test_hosts_have_room_of_their_own(models: dict[str, Path], tmp_path: Path) -> None:
    sizes = {"big": 64 * GIB, "tiny": 1 << 20}
    where = Machine(tuple(host(gpu(GIB, GIB), name=name, free_memory=memory) for name, memory in sizes.items()))
    options: dict[str, Any] = {"model": str(models["llama"]), "device": "cuda", "kernels": "torch"}
    options |= {"pipeline_parallel_size": 2, "cpu_offload_gb": 100.0}
    assert resolve_on(where, **options, offload_to=str(tmp_path)).offload.host_layers == (0, 1, 2)
    with pytest.raises(ValueError, match=r"tiny needs .* of memory"):
        resolve_on(where, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kernels": "triton"}, "give --kernels torch, or split the model"),
        ({"enable_eplb": True, "enable_expert_parallel": True, "tensor_parallel_size": 2}, "leave out enable_eplb, or"),
    ],
)
def test_what_cannot_be_is_refused(models: dict[str, Path], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        on_gpus(models["qwen3_moe"], gpus=2, cpu_offload_gb=1.0, **options)


def test_the_place_of_a_layer_grows() -> None:
    """Of unlike layers, an earlier one moves to the larger place that a later one needs."""
    kernels = TorchKernels(torch.device("cpu"))
    stream, layers = DeviceWeightStream(kernels, range(5), None, set()), []
    for layer in range(5):
        with stream.loading(layer):
            layers.append([kernels.weights_empty(torch.float32, 100 * layer + 1, 7).fill_(layer) for _ in range(2)])
    for _ in range(3):
        for layer, weights in enumerate(layers):
            stream.acquire(layer)
            assert all(bool(torch.all(weight == layer)) for weight in weights)
            stream.release(layer)
    assert len({weight.untyped_storage().data_ptr() for weights in layers for weight in weights}) == LAYER_SLOTS


@pytest.mark.parametrize("experts", [False, True], ids=["layers", "experts"])
def test_what_leaves_takes_no_memory(experts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights are views of mapped memory, which they would hold."""
    mapped: list[weakref.ref[mmap.mmap]] = []
    map_memory = memory.map_memory

    def noted(num_bytes: int) -> mmap.mmap:
        mapped.append(weakref.ref(found := map_memory(num_bytes)))
        return found

    monkeypatch.setattr(memory, "map_memory", noted)
    monkeypatch.setattr(host_memory, "mapped_empty", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    kernels, kept = TorchKernels(torch.device("cpu")), []
    layers = DeviceWeightStream(kernels, range(4), None, set())
    copied = DeviceExpertStream(kernels, 1 << 20, 4, None)
    for layer in range(4):
        with copied.loading() if experts else layers.loading(layer):
            kept.append(kernels.weights_empty(torch.float32, 4, 1 << 18).fill_(layer))
        if experts:
            copied.keep(layer, kept[-1:], 0)
    assert len(mapped) == 4
    assert [found for found in mapped if found() is not None] == []


@pytest.mark.parametrize(("rows", "columns"), [(85, 6000), (128, 1500), (1, 100_000), (7, 1), (3_000, 1)])
def test_pieces_of_host_memory_are_near_powers_of_two(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_LARGEST", 1 << 17)
    monkeypatch.setattr(host_memory, "_SMALLEST", 1 << 8)
    like = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    held = HostRows(like)
    assert torch.equal(torch.cat(held.pieces).view(torch.float32).view(like.shape), like)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(torch.cat(list(held.parts_of(row))).view(torch.float32), like[row])
    taken = sum(1 << (piece.nbytes - 1).bit_length() for piece in held.pieces)
    assert taken <= like.nbytes + (1 << 8)


@pytest.mark.parametrize("last", [(0, False), (1, False), (2, True), (4, False)])
def test_after_a_step_that_was_cut_short_layers_come_again(last: tuple[int, bool]) -> None:
    """`last`: the layer that was acquired last, and whether it was released."""
    kernels, weights = TorchKernels(torch.device("cpu")), []
    stream = DeviceWeightStream(kernels, range(5), None, set())
    for layer in range(5):
        with stream.loading(layer):
            weights.append(kernels.weights_empty(torch.float32, 10, 7).fill_(layer))

    def run(stop: tuple[int, bool]) -> None:
        for layer in range(stop[0] + 1):
            stream.acquire(layer)
            assert bool(torch.all(weights[layer] == layer))
            if layer < stop[0] or stop[1]:
                stream.release(layer)

    def run_all() -> None:
        for stop in (last, (4, True), (4, True)):
            run(stop)
            done.append(stop)

    done: list[tuple[int, bool]] = []
    steps = threading.Thread(target=run_all, daemon=True)
    steps.start()
    steps.join(20.0)
    assert len(done) == 3


def test_what_passes_through_the_memory_of_a_cpu_counts(models: dict[str, Path], tmp_path: Path) -> None:
    for family in ("llama", "qwen3_moe"):
        options: dict[str, Any] = {"model": str(models[family]), "cpu_offload_gb": 100.0, "offload_to": str(tmp_path)}
        pools = []
        for kernels in ("auto", "torch"):
            found = resolve_on(machine(free_memory=64 << 20), device="cpu", kernels=kernels, **options)
            assert isinstance(found.cache.pool, FixedPool)
            pools.append(found.cache.pool.num_blocks * found.cache.block_bytes[0])
            (weights,) = found.weights
        passage = weights.expert_layer_bytes or LAYER_SLOTS * weights.slot_bytes
        # Half of what is left is for the cache, in whole blocks.
        assert pools[0] - pools[1] == pytest.approx(0.46 * passage, abs=2 * found.cache.block_bytes[0])
