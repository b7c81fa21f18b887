"""The GPU back end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardline.deployment.deployment import Deployment, KernelFallback, OffloadPlan, RankPlacement, RankWeights
from shardline.deployment.gpu_support import GRAPHS
from shardline.deployment.kernel_cases import kernel_cases
from shardline.deployment.kernel_proofs import Verdict, verdicts_here
from shardline.deployment.kv_budget import MemoryUse
from shardline.kernels.contract import LoadedProducts
from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.library import use_library
from shardline.kernels.cuda.library_trial import try_library
from shardline.kernels.cuda.proof.trials import OPS
from shardline.kernels.torch.exactness import check_exactness, known_answer
from shardline.kernels.torch.linear import COLUMNS
from shardline.models.partition import Span
from shardline.runtime.layers.context import Streams
from shardline.runtime.machines.base import Backend, BlockTables, Forward, NoReplay, Replay, Share, StepSizes
from shardline.runtime.machines.cuda.fallbacks import choose_kernels
from shardline.runtime.machines.cuda.graphs import CudaRecorder, GraphReplay, PaddedStep
from shardline.runtime.machines.cuda.measuring import CudaMemory, measure_step
from shardline.runtime.machines.cuda.step_inputs import CudaStepInputs, DeviceCounters
from shardline.runtime.machines.cuda.symmetric import SymmetricGather, symmetric_gather
from shardline.runtime.machines.host.machine import use_threads


class CudaBackend:
    """See `base.Backend`."""

    # Captured steps write all logits.
    fuses_argmax = False
    overlaps_steps = True
    draws_dummy_weights = True

    def __init__(self, device: torch.device, name: str, kernel_path: str, num_threads: int = 1) -> None:
        self.num_threads = num_threads
        self.device = device
        self.name = name
        self.kernel_path = kernel_path
        self.kernels = CudaKernels(device, kernel_path.partition("-")[0])
        self._memory = CudaMemory()
        self._fallbacks: tuple[KernelFallback, ...] = ()

    def keep_weight(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    def pages_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def known_answer(self) -> str:
        return ""  # kernels would be compiled for it

    def choose_kernels(self, deployment: Deployment, here: RankPlacement, share: Share) -> tuple[KernelFallback, ...]:
        device = deployment.machine.hosts[here.host].devices[here.device]
        verdicts = verdicts_here(kernel_cases(deployment), device, str(self.device))
        return self.use_kernels(deployment, verdicts, share)

    def use_kernels(
        self, deployment: Deployment, verdicts: Sequence[Verdict], share: Share
    ) -> tuple[KernelFallback, ...]:
        """Use the kernels that are proved on all ranks, see `choose_kernels`."""
        self._fallbacks = choose_kernels(self.kernels, deployment, verdicts, share)
        if self._mixes:
            names = "+".join(fallback.kernel for fallback in self._fallbacks)
            answer = known_answer(self.kernels.stand_ins)
            self.kernel_path += f"-torch{torch.__version__}-{names}-{answer}"
        return self._fallbacks

    @property
    def _mixes(self) -> bool:
        """Whether torch's kernels stand in for some of Triton's."""
        return any(OPS.get(fallback.kernel) for fallback in self._fallbacks)

    def _lacks(self, way: str) -> bool:
        """Whether layers cannot run in one of the ways of `gpu_support`."""
        return self._mixes or any(fallback.kernel == way for fallback in self._fallbacks)

    def finish_loading(self, products: LoadedProducts) -> None:
        """Choose where the library's products are used: where they give our bits, or everywhere if bits may change.

        Raises:
            ValueError: numerics are to be exact, and those of torch's kernels that stand in are not.
        """
        if self._mixes:  # the library would be called from Triton's
            self.kernels.stand_ins.is_exact = products.exact
            shapes = {(columns // COLUMNS or 1, depth) for columns, depth in products.shapes}
            self.kernels.stand_ins.shapes = shapes | {(1, depth) for _, depth in shapes}
            if products.exact:
                check_exactness(self.kernels.stand_ins, products.dtype)
            return
        if not products.exact:
            use_library({}, always=True)
        if not products.exact or not products.shapes:
            return
        free, _ = self._memory.free_and_total()
        use_library(try_library(products.shapes, products.most_rows, products.dtype, self.device, free))
        self._memory.release()

    def share_counters(self, host: Tensor) -> DeviceCounters:
        return DeviceCounters(host, self.device)

    def make_step_inputs(self, table: BlockTables, sizes: StepSizes) -> CudaStepInputs:
        return CudaStepInputs(self.device, table, sizes)

    def make_replay(self, forward: Forward, sizes: StepSizes, *, can_capture: bool) -> Replay:
        if not can_capture or self._lacks(GRAPHS):  # torch's kernels wait for the GPU
            return NoReplay(forward)
        return GraphReplay(forward, PaddedStep(self.device, sizes), sizes.max_seqs, CudaRecorder())

    def stream_weights(self, plan: OffloadPlan, stage: Span, weights: RankWeights) -> Streams:
        raise AssertionError("deployment.weight_offload refuses it")

    def measure_step(self, run_step: Callable[[], object], replay: Replay) -> MemoryUse:
        return measure_step(self._memory, run_step, replay if isinstance(replay, GraphReplay) else None)

    def make_small_gather(self, group: object, timeout: float) -> SymmetricGather | None:
        assert isinstance(group, dist.ProcessGroup)
        return symmetric_gather(group, self.device, timeout)


def open_backend(rank: int, threads: int) -> Backend:
    """The back end of a rank's GPU. Ranks take the host's GPUs in turn; the chosen GPU becomes the current one.

    Raises:
        ValueError: torch finds no GPU.
    """
    use_threads(threads)
    if not torch.cuda.is_available():
        raise ValueError(f"device cuda: torch {torch.__version__} finds no GPU; install a CUDA build, or use cpu")
    import triton

    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    # If the library splits a sum, its parts stay in fp32.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    major, minor = torch.cuda.get_device_capability(index)
    path = f"sm_{major}{minor}-triton{triton.__version__}"
    return CudaBackend(torch.device("cuda", index), torch.cuda.get_device_name(index), path, threads)
