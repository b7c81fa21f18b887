"""Digests of rows of logits: equal rows have equal digests, and unlike rows have unlike ones but for a chance of 2^-64.

Logit i of a row becomes the number i * 2^32 + its bits, which the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)
mixes; the digest is the sum of all, modulo 2^64. It is no cryptographic hash: it tells what ran, not who knows what.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardline.kernels.contract import Kernels


def row_digests(kernels: Kernels, logits: Tensor) -> Tensor:
    """int64 [M] for logits [M, V] fp32; rows may be strided."""
    digests = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    kernels.row_digests(logits, digests)
    return digests


def row_digests_reference(logits: Tensor) -> Tensor:
    bits = logits.contiguous().numpy().view(np.uint32).astype(np.uint64)
    mixed = np.arange(logits.shape[1], dtype=np.uint64) << np.uint64(32) | bits
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
    return torch.from_numpy((mixed ^ mixed >> np.uint64(31)).sum(1, dtype=np.uint64).view(np.int64))
