"""Log-probabilities of the chosen token and of the most likely tokens, on the GPU.

One program computes a row. It passes over the row once for the sum, and once more for each of the most likely tokens.
If these are many, the row is sorted, and each of them has a program that computes it as the chosen token of the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.launch import EXACT
from shardline.kernels.cuda.triton.sampling import argmax_of_row, options_of, rank_of

_MOST_PASSES = 128


def logprobs(
    logits: Tensor,
    chosen: Tensor,
    top_n: int,
    chosen_logprobs: Tensor,
    chosen_ranks: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
) -> None:
    """As `ops.sampling.logprobs.logprobs`, for logits [M, V] fp32, into the tensors of a `Logprobs`."""
    outputs = (chosen_logprobs, chosen_ranks, top_ids, top_logprobs)
    if top_n <= _MOST_PASSES:
        _launch(logits, chosen, top_n, *outputs)
        return
    _launch(logits, chosen, 0, *outputs)
    top_ids.fill_(-1)
    top_logprobs.fill_(float("-inf"))
    for row, ids, values in zip(logits, top_ids, top_logprobs, strict=True):
        strongest = row.sort(descending=True, stable=True).indices[:top_n]
        ids[: len(strongest)] = strongest
        ranks = torch.empty_like(strongest)
        _launch(row.expand(len(strongest), -1), strongest, 0, values[: len(strongest)], ranks, top_ids, top_logprobs)


def _launch(
    logits: Tensor,
    chosen: Tensor,
    top_n: int,
    chosen_logprobs: Tensor,
    chosen_ranks: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
) -> None:
    num_rows, vocab_size = logits.shape
    if num_rows > 0:
        _logprobs_kernel[(num_rows,)](
            logits,
            chosen,
            chosen_logprobs,
            chosen_ranks,
            top_ids,
            top_logprobs,
            logits.stride(0),
            vocab_size,
            top_n,
            **options_of(vocab_size),
            **EXACT,
        )


@triton.jit(do_not_specialize=["top_n"])
def _logprobs_kernel(
    logits_ptr,
    chosen_ptr,
    chosen_logprobs_ptr,
    chosen_ranks_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    stride,
    vocab_size,
    top_n,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits_ptr + index * stride
    lane = tl.arange(0, BLOCK)
    largest, _ = argmax_of_row(row, vocab_size, BLOCK)
    chosen = tl.load(row + tl.load(chosen_ptr + index))
    total = tl.zeros((), tl.float64)
    num_larger = tl.zeros((), tl.int64)
    for begin in range(0, vocab_size, BLOCK):
        logit = tl.load(row + begin + lane, mask=begin + lane < vocab_size, other=float("-inf"))
        total += tl.sum(tl.exp(logit - largest).to(tl.float64), axis=0)
        num_larger += tl.sum((logit > chosen).to(tl.int64), axis=0)
    normalizer = largest.to(tl.float64) + tl.log(total)
    tl.store(chosen_logprobs_ptr + index, (chosen.to(tl.float64) - normalizer).to(tl.float32))
    tl.store(chosen_ranks_ptr + index, num_larger + 1)
    # Each token has a number that rises with its logit, and on ties with a falling id; 0 is no token.
    above = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for place in range(top_n):
        keys = tl.zeros((BLOCK,), tl.int64)
        for begin in range(0, vocab_size, BLOCK):
            token = begin + lane
            logit = tl.load(row + token, mask=token < vocab_size, other=float("nan"))
            rank = rank_of(logit).to(tl.int64)
            key = tl.where(rank > 0, (rank << 31) | (0x7FFFFFFF - token), 0)
            keys = tl.maximum(keys, tl.where(key < above, key, 0))
        above = tl.max(keys, axis=0)
        token = tl.where(above > 0, 0x7FFFFFFF - (above & 0x7FFFFFFF), -1)
        logit = tl.load(row + token, mask=above > 0, other=float("-inf"))
        tl.store(top_ids_ptr + index * top_n + place, token)
        tl.store(top_logprobs_ptr + index * top_n + place, (logit.to(tl.float64) - normalizer).to(tl.float32))
