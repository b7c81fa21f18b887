"""The soft cap of final logits."""

from __future__ import annotations

from torch import Tensor

from shardline.kernels.contract import Kernels


def softcap_(kernels: Kernels, logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), in place; logits [M, V] fp32."""
    kernels.softcap(logits, cap)
    return logits


def softcap_reference(logits: Tensor, cap: float) -> Tensor:
    return (cap * (logits.double() / cap).tanh()).to(logits.dtype)
