"""Settings that the launches of all kernels share."""

from __future__ import annotations

from typing import Any

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Multiply and add are fused only where a kernel uses tl.fma, never by the compiler's choice. So two kernels, or two
tilings of one kernel, with the same arithmetic give the same bits."""


def warps_of_row(block: int) -> int:
    """Number of warps that reduce a row of `block` elements. It depends on the width alone, because it determines the
    order of the sum."""
    return min(16, max(1, block // 512))
