"""What the launches of all kernels share."""

from __future__ import annotations

from typing import Any

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Multiply and add are fused where a kernel says so (tl.fma), never where the compiler likes to: two kernels, or two
tilings of one, that write the same arithmetic then have the same bits."""


def warps_of_row(block: int) -> int:
    """Warps that reduce a row of `block` elements: set by the width alone, as the order of the sum follows from it."""
    return min(16, max(1, block // 512))
