"""Log-probabilities of the chosen token and of the most likely tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardline.kernels.contract import Kernels


class Logprobs(NamedTuple):
    chosen_logprobs: Tensor  # float32 [M]
    chosen_ranks: Tensor  # int64 [M]: 1 + how many tokens have a larger logit
    top_ids: Tensor  # int64 [M, top_n]: larger logit first, then lower id; -1 where the vocabulary is exhausted
    top_logprobs: Tensor  # float32 [M, top_n]


def logprobs(kernels: Kernels, logits: Tensor, chosen: Tensor, top_n: int) -> Logprobs:
    """The log-softmax of logits [M, V] fp32, for chosen ids [M] int64; the row is summed in fp64, in id order."""
    num_rows, device = logits.shape[0], logits.device
    result = Logprobs(
        torch.empty(num_rows, device=device),
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty(num_rows, top_n, dtype=torch.int64, device=device),
        torch.empty(num_rows, top_n, device=device),
    )
    kernels.logprobs(logits, chosen, top_n, *result)
    return result


def logprobs_reference(logits: Tensor, chosen: Tensor, top_n: int) -> Logprobs:
    all_logprobs = logits.double().log_softmax(-1)
    chosen_logits = logits.gather(1, chosen[:, None])
    top_ids = (-logits).sort(dim=1, stable=True).indices[:, :top_n]
    return Logprobs(
        all_logprobs.gather(1, chosen[:, None])[:, 0].float(),
        (logits > chosen_logits).sum(1) + 1,
        top_ids,
        all_logprobs.gather(1, top_ids).float(),
    )
