"""The torch back end: plain torch operations on any device that torch names. Nothing is recorded and replayed."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardline.deployment.deployment import Deployment, KernelFallback, OffloadPlan, RankPlacement, RankWeights
from shardline.deployment.kv_budget import MemoryUse
from shardline.kernels.contract import LoadedProducts
from shardline.kernels.memory import mapped_empty
from shardline.kernels.page_cache import copy_rows
from shardline.kernels.torch.exactness import check_exactness, known_answer
from shardline.kernels.torch.torch_kernels import TorchKernels
from shardline.messages.step import RankStep
from shardline.models.partition import Span
from shardline.runtime.layers.context import Streams
from shardline.runtime.machines.base import Backend, BlockTables, Counters, Forward, NoReplay, Replay, Share, StepSizes
from shardline.runtime.machines.cuda.measuring import CudaMemory, measure_step
from shardline.runtime.machines.cuda.step_inputs import DeviceCounters, Uploader
from shardline.runtime.machines.host.expert_stream import ExpertStream
from shardline.runtime.machines.host.machine import HostCounters
from shardline.runtime.machines.host.step_inputs import InHostMemory
from shardline.runtime.machines.host.step_layout import StepLayout
from shardline.runtime.machines.host.weight_stream import WeightStream
from shardline.runtime.machines.torch.expert_stream import DeviceExpertStream
from shardline.runtime.machines.torch.weight_stream import DeviceWeightStream
from shardline.runtime.sampling.inputs import SamplingInput
from shardline.runtime.sampling.sampler import SamplingPlan
from shardline.runtime.sequences import WorkerSequence
from shardline.runtime.step import StepInput


class TorchStepInputs:
    """See `base.StepInputs`. Every step has tensors of its own, and is over before the next one is made."""

    def __init__(self, device: torch.device, table: BlockTables, sizes: StepSizes) -> None:
        self._layout = StepLayout(table, sizes, reuses_memory=False)
        self._uploader = None if device.type == "cpu" else Uploader(device)

    def make_step(
        self,
        rank_step: RankStep,
        sequences: Sequence[WorkerSequence],
        sampling: SamplingPlan | None,
        greedy: bool,
    ) -> StepInput:
        step = self._layout.make_step(rank_step, sequences, greedy)
        if self._uploader is None:
            return step
        return self._uploader.upload(step if sampling is None else dataclasses.replace(step, sampling=sampling.inputs))

    def keep_tokens(self, sampling: SamplingInput, tokens: Tensor) -> None:
        """Does nothing: the sequence table has the tokens."""

    def download(self, tensors: list[Tensor]) -> InHostMemory:
        return InHostMemory([tensor.cpu() for tensor in tensors])


class TorchBackend:
    """See `base.Backend`."""

    fuses_argmax = False
    overlaps_steps = False

    def __init__(self, device: torch.device, name: str, kernel_path: str, num_threads: int = 1) -> None:
        self.device = device
        self.name = name
        self.num_threads = num_threads
        self.draws_dummy_weights = device.type != "cpu"
        self.kernels = TorchKernels(device)
        # A library chooses its code by the device, so its answers are part of the path.
        self._answer = known_answer(self.kernels)
        self.kernel_path = f"{kernel_path}-{self._answer}"

    def keep_weight(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return copy_rows(tensor, self.kernels.weights_empty(tensor.dtype, *tensor.shape))
        return self.kernels.noted(tensor.contiguous())

    def pages_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.device.type == "cpu":
            return mapped_empty(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def known_answer(self) -> str:
        return self._answer

    def choose_kernels(self, deployment: Deployment, here: RankPlacement, share: Share) -> tuple[KernelFallback, ...]:
        return ()

    def finish_loading(self, products: LoadedProducts) -> None:
        """Raises:
        ValueError: numerics are to be exact, and this device's are not.
        """
        self.kernels.is_exact = products.exact
        if products.exact:
            check_exactness(self.kernels, products.dtype)

    def share_counters(self, host: Tensor) -> Counters:
        return HostCounters(host) if self.device.type == "cpu" else DeviceCounters(host, self.device)

    def make_step_inputs(self, table: BlockTables, sizes: StepSizes) -> TorchStepInputs:
        return TorchStepInputs(self.device, table, sizes)

    def make_replay(self, forward: Forward, sizes: StepSizes, *, can_capture: bool) -> Replay:
        return NoReplay(forward)

    def stream_weights(self, plan: OffloadPlan, stage: Span, weights: RankWeights) -> Streams:
        own, folder, stream, experts = plan.of_stage(stage), Path(plan.folder), None, None
        if own.layers:
            in_files = [layer for layer in own.layers if layer not in own.host_layers]
            files = WeightStream(folder, in_files, weights.slot_bytes) if in_files else None
            stream = DeviceWeightStream(self.kernels, own.layers, files, set(in_files))
        if own.expert_layers:
            count, sizes = len(own.expert_layers), (weights.host_bytes, weights.expert_layer_bytes)
            behind = ExpertStream(folder, *sizes, count) if plan.folder else None
            experts = DeviceExpertStream(self.kernels, weights.kept_expert_bytes, count, behind)
        return stream, experts

    def measure_step(self, run_step: Callable[[], object], replay: Replay) -> MemoryUse:
        return measure_step(CudaMemory(), run_step, None)

    def make_small_gather(self, group: object, timeout: float) -> None:
        return None


def open_backend(kind: str, rank: int, threads: int) -> Backend:
    """The back end of a rank on a device of this kind. Ranks take the host's devices in turn.

    Raises:
        ValueError: torch finds no such device.
    """
    torch.set_num_threads(threads)
    if kind == "cpu":
        path = f"torch{torch.__version__}-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
        return TorchBackend(torch.device("cpu"), "CPU", path, threads)
    module = torch.get_device_module(kind)
    if not module.is_available():
        raise ValueError(f"device {kind}: torch {torch.__version__} finds none on this host; use --device cpu")
    device = torch.device(kind, rank % module.device_count())
    if kind != "mps":
        module.set_device(device)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else kind
    return TorchBackend(device, name, f"torch{torch.__version__}-{name.replace(' ', '_')}", threads)
