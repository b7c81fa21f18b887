"""Settings that the launches of all kernels share, and the GPU to which they are fitted."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from shardline.deployment.generations import Generation, generation_of, generations
from shardline.deployment.machine import Device

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Multiply and add are fused only where a kernel uses tl.fma, never by the compiler's choice. So two kernels, or two
tilings of one kernel, with the same arithmetic give the same bits."""

_IS_INTERPRETED = triton.knobs.runtime.interpret  # decided when kernels are imported
_generation = generations()["sm_90"]


def use_generation(capability: str) -> None:
    """Fit the launches of this process to a GPU; without a known capability, to Hopper."""
    global _generation
    _generation = generation_of(Device("cuda", "", 0, 0, capability)) or generations()["sm_90"]


def generation() -> Generation:
    """That to which the launches of this process are fitted."""
    return _generation


def early_options() -> dict[str, Any]:
    """Options of a kernel that begins with `begin_early`, as those of a decode step's layers do: where the GPU can, it
    is started before the kernel before it has ended (programmatic dependent launch)."""
    is_early = _generation.launches_early and not _IS_INTERPRETED
    return {**EXACT, "IS_EARLY": is_early, **({"launch_pdl": True} if is_early else {})}


@triton.jit
def begin_early(IS_EARLY: tl.constexpr):
    """Let the next kernel start, and wait for the end of the one before."""
    if IS_EARLY:
        gdc_launch_dependents()
        gdc_wait()


def warps_of_row(block: int) -> int:
    """Number of warps that reduce a row of `block` elements. It depends on the width alone, because it determines the
    order of the sum."""
    return min(16, max(1, block // 512))
