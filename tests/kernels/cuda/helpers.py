"""The GPU's back end on host memory, where Triton's interpreter runs its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.deployment.deployment import Deployment, KernelFallback, RankPlacement
from shardline.kernels.contract import Kernels, LoadedProducts
from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.runtime.machines.base import Forward, NoReplay, Replay, Share, StepSizes
from shardline.runtime.machines.cuda.machine import CudaBackend
from shardline.weights.base import PackedExperts, weight_format

CPU = torch.device("cpu")
KERNELS = CudaKernels(CPU)


class InterpretedBackend(CudaBackend):
    """A GPU whose memory is the host's. It captures no graphs, and does not try the library's products."""

    def __init__(self) -> None:
        super().__init__(CPU, "Triton's interpreter", "interpreter", num_threads=1)

    def choose_kernels(self, deployment: Deployment, here: RankPlacement, share: Share) -> tuple[KernelFallback, ...]:
        return ()

    def finish_loading(self, products: LoadedProducts) -> None: ...

    def make_replay(self, forward: Forward, sizes: StepSizes, *, can_capture: bool) -> Replay:
        return NoReplay(forward)


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The oracle of `linear`."""
    return weight_format("plain").multiply_reference(KERNELS, x, weight, bias, out_dtype or x.dtype)


def pack_experts(kernels: Kernels, weights: Tensor, name: str = "plain") -> PackedExperts:
    """weights: [E, out, in]"""
    format = weight_format(name)
    experts = format.allocate_experts(kernels, len(weights), weights[0])
    for index, weight in enumerate(weights):
        format.pack_expert(kernels, experts, index, weight)
    return experts
