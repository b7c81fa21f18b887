"""Several ranks with the GPU's kernels, as threads: a row's logits have the bits that one rank gives them."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from shardline import _cpu
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment
from shardline.deployment.here import resolve_here
from shardline.deployment.segment import segment_layout
from shardline.runtime.machines.base import NoReplay, StepSizes
from shardline.runtime.machines.cuda.graphs import GraphReplay, PaddedStep, Recording, batch_sizes
from shardline.runtime.machines.cuda.machine import CudaBackend
from shardline.runtime.parallel.groups import RankGroups, connect_host_memory, make_single_rank_groups
from shardline.runtime.worker import Worker
from tests.kernels.cuda.helpers import CPU, KERNELS, InterpretedBackend
from tests.kernels.cuda.test_model import PROMPT, step_of
from tests.models.checkpoints import make_checkpoint
from tests.runtime.ops.helpers import assert_same_bits

STEPS = [(PROMPT[:10], 0), (PROMPT[10:], 10), ([40], 17), ([41], 18)]


pytestmark = pytest.mark.usefixtures("one_kernel_at_a_time")


def setup_of(model: Path, **layout: object) -> Deployment:
    chosen = {"dtype": "float32", "device": "cpu", "cpu_threads": 1, "num_gpu_blocks_override": 8, "max_model_len": 64}
    chosen["block_size"] = 16
    return resolve_here(EngineConfig.from_options(model=str(model), **chosen, **layout))


def on_ranks(setup: Deployment, work: Callable[[Worker, RankGroups], list[Tensor]]) -> list[list[Tensor]]:
    """What `work` gives on each rank."""
    layout = segment_layout(setup, 0, 0)
    segment = memoryview(mmap.mmap(-1, layout.num_bytes))

    def run(rank: int) -> list[Tensor]:
        groups = connect_host_memory(KERNELS, segment, layout, rank, 60.0)
        worker = Worker(setup, InterpretedBackend(), groups)
        worker.load()
        with torch.inference_mode():
            return work(worker, groups)

    with ThreadPoolExecutor(setup.grid.world_size) as pool:
        return list(pool.map(run, range(setup.grid.world_size)))


def logits(worker: Worker, groups: RankGroups) -> list[Tensor]:
    """Of a prompt in two chunks and of two decode steps, all columns."""
    stage, results = worker.stage, []
    for tokens, start in STEPS:
        step = step_of(tokens, start)
        local = stage.forward(step, stage.embed(step))
        assert stage.lm_head is not None
        results.append(groups["tensor"].all_gather_columns(local, [span.size for span in stage.lm_head.spans]).clone())
    return results


def logits_of_one(model: Path) -> list[Tensor]:
    setup = setup_of(model)
    groups = make_single_rank_groups(len(setup.spec.layers) if setup.num_experts else 0, setup.num_experts)
    worker = Worker(setup, InterpretedBackend(), groups)
    worker.load()
    with torch.inference_mode():
        return logits(worker, groups)


@pytest.mark.parametrize(("family", "size"), [("mixtral", 3), ("qwen2_moe", 2)])
def test_whole_experts(tmp_path: Path, family: str, size: int) -> None:
    make_checkpoint(family, tmp_path, num_hidden_layers=2)
    expected = logits_of_one(tmp_path)
    setup = setup_of(tmp_path, tensor_parallel_size=size, enable_expert_parallel=True)
    for ours in on_ranks(setup, logits):
        for actual, alone_ in zip(ours, expected, strict=True):
            assert_same_bits(actual, alone_)


class Recorder:
    """Replays by calling again, and writes where the recorded call did."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def record_call(self, call: Callable[[], Tensor]) -> Recording:
        output = call().clone()

        def replay() -> None:
            self.order.append(len(output))
            output.copy_(call())

        return Recording(replay, output)

    def discard_recordings(self) -> None: ...


def test_recorded_decode_steps_of_a_group(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, num_hidden_layers=2)
    expected = logits_of_one(tmp_path)
    setup = setup_of(tmp_path, tensor_parallel_size=2)
    orders = []

    def replayed(worker: Worker, groups: RankGroups) -> list[Tensor]:
        stage, recorder = worker.stage, Recorder()
        sizes = StepSizes(
            max_seqs=4,
            max_blocks=setup.cache.max_blocks,
            num_kv_groups=1,
            block_size=16,
            hidden_size=64,
            dtype=torch.float32,
        )
        replay = GraphReplay(stage.forward, PaddedStep(CPU, sizes), 4, recorder)
        replay.capture_steps()
        stage.forward = replay  # type: ignore[method-assign]
        results = logits(worker, groups)
        orders.append(recorder.order)
        return results

    for ours in on_ranks(setup, replayed):
        for actual, alone_ in zip(ours, expected, strict=True):
            assert_same_bits(actual, alone_)
    assert orders == [[1, 1], [1, 1]], "both ranks replay the two decode steps, and only these"
    assert batch_sizes(4) == [1, 2, 4]


class HostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations of torch's for which the host would have to wait: sizes or numbers that follow from values."""

    WAITING = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten._unique2", "aten.bincount")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        masks = [leaf for leaf in tree_leaves(args[1:]) if isinstance(leaf, Tensor) and leaf.dtype == torch.bool]
        if name.startswith(self.WAITING) or (name.startswith(("aten.index.", "aten.index_put")) and masks):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("family", "waits"), [("llama", 0), ("mixtral", 0), ("deepseek_v3", 0), ("qwen2_moe", 2)])
def test_the_host_waits_for_nothing_but_whole_experts(tmp_path: Path, family: str, waits: int) -> None:
    make_checkpoint(family, tmp_path, num_hidden_layers=2)
    setup = setup_of(tmp_path, tensor_parallel_size=2, enable_expert_parallel=bool(waits))

    def watched(worker: Worker, groups: RankGroups) -> list[Tensor]:
        step = step_of(PROMPT, 0)
        with HostWaits() as watch:
            worker.stage.forward(step, worker.stage.embed(step))
        assert watch.found == []
        return []

    with patch.object(_cpu, "count_exchanged", wraps=_cpu.count_exchanged) as counted:
        on_ranks(setup, watched)
    assert counted.call_count == waits


LAUNCHES = {
    "llama": "norm linear rope_and_write attention linear norm linear linear",
    "llama-int8_fast": "norm linear rope_and_write attention quantize linear norm linear quantize linear",
    "qwen3_moe": "norm linear norm norm rope_and_write attention linear "
    "norm linear route sort grouped sort grouped combine",
}
"""Of a later layer in a decode step; a context of several splits adds one, where few sequences have programs for each.
"""


@pytest.mark.parametrize("family", LAUNCHES)
def test_launches_of_a_layer(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, quantization = family.partition("-")
    make_checkpoint(name, tmp_path, num_hidden_layers=3, head_dim=32)
    setup = setup_of(tmp_path, **({"quantization": quantization} if quantization else {}))
    worker = Worker(setup, InterpretedBackend(), make_single_rank_groups(3, setup.num_experts))
    worker.load()
    launched: list[str] = []
    run = GridExecutor.__call__

    def named(self: GridExecutor, *args: object, **options: object) -> None:
        launched.append(self.fn.__name__.strip("_").removesuffix("_kernel"))
        run(self, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", named)
    step = step_of([40], 0)
    with torch.inference_mode():
        first, second, third = worker.stage.layers
        stream = second(*first(worker.stage.embed(step), None, step.rows))
        launched.clear()
        third(*stream)
    assert " ".join(launched) == LAUNCHES[family]


@pytest.mark.parametrize(
    ("capturable", "layout", "is_replayed"),
    [
        (True, {}, True),
        (True, {"tensor_parallel_size": 2}, True),
        (False, {"tensor_parallel_size": 2}, False),
        (True, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, False),
    ],
)
def test_what_is_captured(tmp_path: Path, capturable: bool, layout: dict[str, object], is_replayed: bool) -> None:
    """Everything but exchanges over host memory, and those for whose sizes the host waits."""
    setup = setup_of(make_checkpoint("mixtral", tmp_path), **layout)
    group: Any = Group(capturable, setup.grid.tensor)
    alone = make_single_rank_groups()
    groups = dataclasses.replace(alone, collectives={**alone.collectives, "tensor": group, "expert": group})
    worker = Worker(setup, CudaBackend(CPU, "none", "none"), groups)
    replay = worker._make_replay(Stage())  # type: ignore[arg-type]
    assert isinstance(replay, GraphReplay if is_replayed else NoReplay)


class Group:
    def __init__(self, is_capturable: bool, size: int) -> None:
        self.is_capturable, self.size = is_capturable, size


class Stage:
    def forward(self) -> None: ...
