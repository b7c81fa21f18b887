"""The CPU back end."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardline import _cpu, env
from shardline.deployment.deployment import Deployment, KernelFallback, OffloadPlan, RankPlacement, RankWeights
from shardline.deployment.kv_budget import MemoryUse
from shardline.kernels.contract import LoadedProducts
from shardline.kernels.host.kernels import HostKernels
from shardline.kernels.host.known_answers import known_answer
from shardline.kernels.host.memory import streamed_empty, weight_reserve
from shardline.kernels.memory import mapped_empty
from shardline.kernels.page_cache import copy_rows
from shardline.models.partition import Span
from shardline.runtime.layers.context import Streams
from shardline.runtime.machines.base import Backend, BlockTables, Forward, Replay, Share, StepSizes
from shardline.runtime.machines.host.expert_stream import ExpertStream
from shardline.runtime.machines.host.replay import DecodeReplay
from shardline.runtime.machines.host.step_inputs import HostStepInputs
from shardline.runtime.machines.host.weight_stream import WeightStream


class HostCounters:
    """See `base.Counters`: the kernels count directly in the memory that the host reads."""

    def __init__(self, host: Tensor) -> None:
        self.counts = host

    def publish_counts(self) -> None: ...


class HostBackend:
    """See `base.Backend`."""

    name = "CPU"
    device = torch.device("cpu")
    fuses_argmax = True
    overlaps_steps = False
    draws_dummy_weights = False

    def __init__(self, num_threads: int = 1) -> None:
        self.num_threads = num_threads
        self.kernels = HostKernels()
        self.kernel_path = f"{platform.machine()}-{_cpu.isa()}"

    def keep_weight(self, tensor: Tensor) -> Tensor:
        return copy_rows(tensor, streamed_empty(tensor.shape, tensor.dtype))

    def stream_weights(self, plan: OffloadPlan, stage: Span, weights: RankWeights) -> Streams:
        own, folder = plan.of_stage(stage), Path(plan.folder)
        count = len(own.expert_layers)
        return (
            WeightStream(folder, own.layers, weights.slot_bytes) if own.layers else None,
            ExpertStream(folder, weights.kept_expert_bytes, weights.expert_layer_bytes, count) if count else None,
        )

    def pages_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return mapped_empty(shape, dtype)  # attention streams through pages as products stream through weights

    def known_answer(self) -> str:
        return known_answer()

    def choose_kernels(self, deployment: Deployment, here: RankPlacement, share: Share) -> tuple[KernelFallback, ...]:
        return ()

    def finish_loading(self, products: LoadedProducts) -> None:
        weight_reserve.release_rest()

    def share_counters(self, host: Tensor) -> HostCounters:
        return HostCounters(host)

    def make_step_inputs(self, table: BlockTables, sizes: StepSizes) -> HostStepInputs:
        return HostStepInputs(table, sizes)

    def make_replay(self, forward: Forward, sizes: StepSizes, *, can_capture: bool) -> DecodeReplay:
        """`can_capture` is ignored: a program can include any exchange."""
        return DecodeReplay(forward, sizes)

    def measure_step(self, run_step: Callable[[], object], replay: Replay) -> MemoryUse:
        raise AssertionError("the KV cache size of a host is configured, not measured")

    def make_small_gather(self, group: object, timeout: float) -> None:
        return None


def use_threads(threads: int) -> None:
    """Set the number of threads of our kernels, for the calling thread. torch gets one thread, since more would compete
    for the cores."""
    torch.set_num_threads(1)
    _cpu.set_num_threads(threads)
    if (isa := env.force_isa()) is not None:
        _cpu.set_isa(isa)


def open_backend(rank: int, threads: int) -> Backend:
    """See `backends.open_backend`."""
    use_threads(threads)
    return HostBackend(threads)
