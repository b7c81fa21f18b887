"""Which of the GPU's kernels are used: those that serve the model and are proved here, and else torch's."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from shardline.deployment.deployment import Deployment, KernelFallback
from shardline.deployment.gpu_support import lacking_kernels
from shardline.deployment.kernel_cases import kernel_cases
from shardline.deployment.kernel_proofs import Verdict
from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.proof.trials import OPS
from shardline.runtime.machines.base import Share

_log = logging.getLogger(__name__)


def choose_kernels(
    kernels: CudaKernels, deployment: Deployment, verdicts: Sequence[Verdict], share: Share
) -> tuple[KernelFallback, ...]:
    """Replace the kernels that lack a part of the model, those that failed on any rank, and those that no case speaks
    for. `verdicts`: those of this rank. Returns the former two.

    Raises:
        ValueError: some kernel failed, and only proved ones were asked for.
    """
    own = {verdict.case.kernel: verdict.fallback for verdict in reversed(verdicts) if verdict.problem}
    failed = dict(own)
    for rank, answer in enumerate(share(msgspec.msgpack.encode(list(own.values())))):
        for fallback in msgspec.msgpack.decode(answer, type=list[KernelFallback]):
            failed.setdefault(fallback.kernel, KernelFallback(fallback.kernel, f"rank {rank}: {fallback.why}"))
    if failed and deployment.kernels == "triton":
        names = "; ".join(f"{kernel}: {failed[kernel].why}" for kernel in sorted(failed))
        raise ValueError(f"--kernels triton, and not all kernels are proved here: {names}; use --kernels auto")
    lacks = {kernel: KernelFallback(kernel, why) for kernel, why in lacking_kernels(deployment.spec).items()}
    unused = {**failed, **lacks}
    found = tuple(unused[kernel] for kernel in sorted(unused))
    needed = {case.kernel for case in kernel_cases(deployment)}
    proved = {op for kernel in needed - set(failed) for op in OPS[kernel]}
    wrong = {op for kernel in unused for op in OPS.get(kernel, ())}
    kernels.replace({op for ops in OPS.values() for op in ops} - (proved - wrong))
    for fallback in found:
        _log.log(logging.INFO if fallback.kernel in lacks else logging.WARNING, "%s", fallback)
    return found
