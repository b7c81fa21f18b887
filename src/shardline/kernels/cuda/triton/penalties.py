"""Penalties, logit bias and banned tokens, on the GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.launch import EXACT

_BLOCK = 256


def penalize(
    logits: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    offsets: Tensor,
    ids: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    bias: Tensor,
    uncounted: Tensor | None = None,
) -> None:
    """As `ops.sampling.penalties.penalize_`. Ids outside the vocabulary are ignored, because the host does not check
    them."""
    num_rows, vocab_size = logits.shape
    if num_rows > 0:
        _penalize_kernel[(num_rows,)](
            logits,
            repetition,
            presence,
            frequency,
            offsets,
            ids,
            output_counts,
            in_prompt,
            bias,
            uncounted,
            logits.stride(0),
            vocab_size,
            BLOCK=_BLOCK,
            **EXACT,
        )


@triton.jit
def _penalized(logit, bias, count, in_prompt, repetition, presence, frequency):
    logit = logit + bias
    divided = tl.where(logit > 0.0, tl.div_rn(logit, repetition), logit * repetition)
    logit = tl.where((count > 0) | in_prompt, divided, logit)
    return tl.where(count > 0, logit - frequency * count.to(tl.float32) - presence, logit)


@triton.jit
def _penalize_kernel(
    logits_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    offsets_ptr,
    ids_ptr,
    counts_ptr,
    in_prompt_ptr,
    bias_ptr,
    uncounted_ptr,
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride
    repetition, presence = tl.load(repetition_ptr + row), tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    one = tl.arange(0, 1)
    repetitions = tl.full((BLOCK,), 0.0, tl.float32) + repetition
    uncounted = tl.full((1,), -1, tl.int64)
    if uncounted_ptr is not None:
        uncounted = tl.load(uncounted_ptr + row + one)
    num_found = tl.zeros((), tl.int32)
    end = tl.load(offsets_ptr + row + 1)
    for begin in range(tl.load(offsets_ptr + row), end, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        token = tl.load(ids_ptr + entry, mask=entry < end, other=-1)
        inside = (token >= 0) & (token < vocab_size)
        is_uncounted = inside & (token == uncounted)
        num_found += tl.sum(is_uncounted.to(tl.int32), axis=0)
        count = tl.load(counts_ptr + entry, mask=inside, other=0) + is_uncounted.to(tl.int32)
        in_prompt = tl.load(in_prompt_ptr + entry, mask=inside, other=0) != 0
        bias = tl.load(bias_ptr + entry, mask=inside, other=0.0)
        logit = tl.load(logits + token, mask=inside, other=0.0)
        changed = _penalized(logit, bias, count, in_prompt, repetitions, presence, frequency)
        tl.store(logits + token, changed, mask=inside)
    if uncounted_ptr is not None:
        # The token is new: the row's entries do not contain it.
        is_new = (uncounted >= 0) & (uncounted < vocab_size) & (num_found == 0)
        logit = tl.load(logits + uncounted, mask=is_new, other=0.0)
        repetitions = tl.full((1,), 0.0, tl.float32) + repetition
        count = tl.full((1,), 1, tl.int32)
        changed = _penalized(logit, 0.0, count, count < 0, repetitions, presence, frequency)
        tl.store(logits + uncounted, changed, mask=is_new)
