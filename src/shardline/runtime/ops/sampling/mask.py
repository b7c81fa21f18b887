"""Only some tokens are allowed: the logits of all others become -inf."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels


class TokenMasks(NamedTuple):
    """The allowed tokens of some rows of a batch."""

    rows: Tensor
    """[N] int64: indices of the rows, without repetition."""
    bits: Tensor
    """[N, ceil(V / 32)] int32: token t is allowed if bit t % 32 of word t // 32 is set."""


def mask_tokens_(kernels: Kernels, logits: Tensor, masks: TokenMasks) -> Tensor:
    """Set the logits [M, V] of tokens that are not allowed to -inf, in place."""
    kernels.mask_tokens(logits, masks.rows, masks.bits)
    return logits


def mask_tokens_reference(logits: Tensor, masks: TokenMasks) -> Tensor:
    out = logits.clone()
    for row, words in zip(masks.rows.tolist(), masks.bits.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if not (words[token // 32] >> (token % 32)) & 1:
                out[row, token] = -torch.inf
    return out
