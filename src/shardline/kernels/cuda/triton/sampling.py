"""One token per row of logits, on the GPU: greedy, or drawn from what the filters keep. No row is sorted.

One program per row passes over it in blocks. Two passes collect the strongest tokens, if few of them decide. The
cut-offs of top-k and top-p are found bit by bit: logits are mapped to integers in the same order, and each of 16 passes
fixes 2 bits by counting (or weighing) the tokens at or above a candidate. Sums are fp64, in an order that depends only
on the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardline.kernels.cuda.triton.launch import EXACT, warps_of_row

_BLOCK = 8192
_GREEDY_BELOW = 1e-5
_MOST_KEPT = 8192
"""Tokens of a row that are collected before the cut-offs are sought."""
_FIRST, _SECOND, _THIRD = tl.constexpr(-3.0), tl.constexpr(-6.0), tl.constexpr(-12.0)
"""How far below the largest logit, in temperatures, the collected tokens may begin."""


def greedy_argmax(logits: Tensor, ids: Tensor, values: Tensor) -> None:
    """As `ops.sampling.sample.greedy_argmax`: logits [M, V] fp32 to ids [M] int64 and values [M] fp32."""
    num_rows, vocab_size = logits.shape
    if num_rows > 0:
        _greedy_kernel[(num_rows,)](logits, ids, values, logits.stride(0), vocab_size, **options_of(vocab_size))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    choices: Tensor,
    positions: Tensor,
    purpose: int,
    tokens: Tensor,
) -> None:
    """As `ops.sampling.sample.sample`, into tokens [M] int64."""
    num_rows, vocab_size = logits.shape
    if num_rows > 0:
        kept_logits, kept_ids = (
            torch.empty(num_rows, _MOST_KEPT, dtype=dtype, device=logits.device)
            for dtype in (torch.float32, torch.int32)
        )
        _sample_kernel[(num_rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            choices,
            positions,
            tokens,
            kept_logits,
            kept_ids,
            logits.stride(0),
            vocab_size,
            PURPOSE=purpose,
            GREEDY_BELOW=_GREEDY_BELOW,
            MOST=_MOST_KEPT,
            **options_of(vocab_size),
            **EXACT,
        )


def options_of(vocab_size: int) -> dict[str, int]:
    """Options of a kernel with a program for each row: tokens that it processes at once, and its warps. There are many
    of both, since a program waits for memory most of the time."""
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    return {"BLOCK": block, "num_warps": warps_of_row(block)}


@triton.jit
def argmax_of_row(row_ptr, vocab_size, BLOCK: tl.constexpr):
    """(the largest logit, its lowest id); NaN counts as -inf."""
    lane = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    best = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocab_size, BLOCK):
        logit = tl.load(row_ptr + begin + lane, mask=begin + lane < vocab_size, other=float("-inf"))
        better = logit > largest
        largest, best = tl.where(better, logit, largest), tl.where(better, begin + lane, best)
    top = tl.max(largest, axis=0)
    return top, tl.min(tl.where(largest == top, best, vocab_size), axis=0)


@triton.jit
def _greedy_kernel(logits_ptr, ids_ptr, values_ptr, stride, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    value, best = argmax_of_row(logits_ptr + row * stride, vocab_size, BLOCK)
    tl.store(ids_ptr + row, best.to(tl.int64))
    tl.store(values_ptr + row, value)


@triton.jit
def _uniform(seed, choice, position, PURPOSE: tl.constexpr):
    """A double in [0, 1) with 53 random bits, from Philox4x32-10: key = seed, counter = (position, choice, purpose)."""
    position = position.to(tl.uint64, bitcast=True)
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    purpose = tl.full((), PURPOSE, tl.uint32)
    first, second, _, _ = tl.philox(seed.to(tl.uint64, bitcast=True), low, high, choice.to(tl.uint32), purpose)
    return ((first.to(tl.uint64) << 32 | second.to(tl.uint64)) >> 11).to(tl.float64) * (1.0 / 9007199254740992)


@triton.jit
def rank_of(logit):
    """An integer that rises with the logit; NaN is 0, alone."""
    bits = (logit + 0.0).to(tl.uint32, bitcast=True)  # -0 and 0 are equal
    rank = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(logit != logit, tl.zeros_like(rank), rank)


@triton.jit
def _weights(source, begin, num_tokens, largest, inverse, min_p, floor, BLOCK: tl.constexpr):
    """(places, ranks, weights) of a block: exp((logit - largest) / temperature), zero for tokens that min_p and `floor`
    drop. `source`: the row, its collected tokens, and whether these stand for it."""
    row_ptr, kept_ptr, is_narrow = source
    place = begin + tl.arange(0, BLOCK)
    inside = place < num_tokens
    # Not every compiler can choose a pointer.
    logit = tl.load(row_ptr + place, mask=inside & (not is_narrow), other=float("nan"))
    logit = tl.where(is_narrow, tl.load(kept_ptr + place, mask=inside & is_narrow, other=float("nan")), logit)
    rank = rank_of(logit)
    weight = tl.exp((logit - largest) * inverse)
    kept = (rank != 0) & (rank >= floor) & (weight >= min_p)
    return place, rank, tl.where(kept, weight, 0.0)


@triton.jit
def _narrow(
    row_ptr, num_tokens, largest, inverse, min_p, target, by_count, logits_ptr, ids_ptr,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(number, total): the strongest tokens, which reach the number `target`, or else that share of the weight, in
    logits_ptr and ids_ptr, if there are at most MOST; else the number is 0. `total` is the weight of all."""
    total = tl.zeros((), tl.float64)
    first = tl.zeros((), tl.float64)
    second = tl.zeros((), tl.float64)
    third = tl.zeros((), tl.float64)
    for begin in range(0, num_tokens, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        scaled = (tl.load(row_ptr + place, mask=place < num_tokens, other=float("nan")) - largest) * inverse
        weight = tl.exp(scaled)
        weight = tl.where((scaled == scaled) & (weight >= min_p), weight, 0.0).to(tl.float64)
        total += tl.sum(weight, axis=0)
        size = tl.where(by_count, 1.0, weight)
        first += tl.sum(tl.where(scaled >= _FIRST, size, 0.0), axis=0)
        second += tl.sum(tl.where(scaled >= _SECOND, size, 0.0), axis=0)
        third += tl.sum(tl.where(scaled >= _THIRD, size, 0.0), axis=0)
    needed = tl.where(by_count, target, target * total)
    lowest = tl.where(first >= needed, _FIRST, tl.where(second >= needed, _SECOND, _THIRD))
    number = tl.zeros((), tl.int32)
    if third >= needed:
        for begin in range(0, num_tokens, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            logit = tl.load(row_ptr + place, mask=place < num_tokens, other=float("nan"))
            taken = (logit - largest) * inverse >= lowest
            at = number + tl.cumsum(taken.to(tl.int32), axis=0) - 1
            tl.store(logits_ptr + at, logit, mask=taken & (at < MOST))
            tl.store(ids_ptr + at, place, mask=taken & (at < MOST))
            number += tl.sum(taken.to(tl.int32), axis=0)
        tl.debug_barrier()
    return tl.where(number <= MOST, number, 0), total


@triton.jit
def _cutoff(source, num_tokens, largest, inverse, min_p, floor, target, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """(rank, mass above): the highest rank at which it and all ranks above reach the weight (or count) `target`; 0 if
    there is none."""
    found = tl.zeros((), tl.uint32)
    above = tl.zeros((), tl.float64)
    low_bit = tl.full((), 30, tl.int32)
    for _level in range(16):
        shift = low_bit.to(tl.uint32)
        first = tl.zeros((), tl.float64)
        second = tl.zeros((), tl.float64)
        third = tl.zeros((), tl.float64)
        for begin in range(0, num_tokens, BLOCK):
            _places, rank, weight = _weights(source, begin, num_tokens, largest, inverse, min_p, floor, BLOCK)
            size = (rank != 0).to(tl.int32) if BY_COUNT else weight.to(tl.float64)
            # Only tokens whose higher digits match `found` count; they are split by this digit.
            digit = tl.where((rank >> shift >> 2) == (found >> shift >> 2), ((rank >> shift) & 3).to(tl.int32), 0)
            first += tl.sum(tl.where(digit == 1, size, 0), axis=0).to(tl.float64)
            second += tl.sum(tl.where(digit == 2, size, 0), axis=0).to(tl.float64)
            third += tl.sum(tl.where(digit == 3, size, 0), axis=0).to(tl.float64)
        # Without the target, the digit is 0, and so are all below it.
        if (third > 0.0) & (above + third >= target):
            found = found | (3 << shift)
        elif (second > 0.0) & (above + (second + third) >= target):
            found = found | (2 << shift)
            above += third
        elif (first > 0.0) & (above + (first + (second + third)) >= target):
            found = found | (1 << shift)
            above += second + third
        else:
            above += first + (second + third)
        low_bit -= 2
    return found, above


@triton.jit
def _total(source, num_tokens, largest, inverse, min_p, floor, last_rank, last_place, BLOCK: tl.constexpr):
    """The weight of all tokens above last_rank, and of those at last_rank with places up to last_place."""
    total = tl.zeros((), tl.float64)
    for begin in range(0, num_tokens, BLOCK):
        place, rank, weight = _weights(source, begin, num_tokens, largest, inverse, min_p, floor, BLOCK)
        kept = (rank > last_rank) | ((rank == last_rank) & (place <= last_place))
        total += tl.sum(tl.where(kept, weight, 0.0).to(tl.float64), axis=0)
    return total


@triton.jit
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    choices_ptr,
    positions_ptr,
    tokens_ptr,
    kept_logits_ptr,
    kept_ids_ptr,
    stride,
    vocab_size,
    PURPOSE: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits_ptr + index * stride
    temperature = tl.load(temperature_ptr + index)
    largest, best = argmax_of_row(row, vocab_size, BLOCK)
    # An infinite logit has all the mass. If all logits are -inf or NaN, there is no distribution to draw from.
    if (temperature < GREEDY_BELOW) | (tl.abs(largest) == float("inf")):
        tl.store(tokens_ptr + index, best.to(tl.int64))
        return
    inverse = tl.div_rn(1.0, temperature)
    min_p = tl.load(min_p_ptr + index)
    top_k, top_p = tl.load(top_k_ptr + index), tl.load(top_p_ptr + index)
    cuts_count = (top_k > 0) & (top_k < vocab_size)
    # Mostly, few tokens reach the cut-offs. They are collected, and then stand for the row: places are theirs.
    num_tokens = vocab_size
    kept_logits, kept_ids = kept_logits_ptr + index * MOST, kept_ids_ptr + index * MOST
    mass = tl.zeros((), tl.float64)
    is_narrow = tl.full((), 0, tl.int1)
    if cuts_count | (top_p < 1.0):
        target = tl.where(cuts_count, top_k.to(tl.float64), top_p.to(tl.float64))
        number, mass = _narrow(
            row, vocab_size, largest, inverse, min_p, target, cuts_count, kept_logits, kept_ids, MOST, BLOCK
        )
        is_narrow = number > 0
        num_tokens = tl.where(is_narrow, number, vocab_size)
    source = (row, kept_logits, is_narrow)
    floor = tl.zeros((), tl.uint32)
    if cuts_count:
        # Tokens that equal the k-th largest are kept too, as in other engines. A NaN makes the row shorter.
        count = top_k.to(tl.float64)
        floor, _ = _cutoff(source, num_tokens, largest, inverse, 0.0, floor, count, True, BLOCK)
    last_rank = tl.zeros((), tl.uint32)
    last_place = num_tokens
    if cuts_count | (top_p >= 1.0):
        mass = _total(source, num_tokens, largest, inverse, min_p, floor, last_rank, last_place, BLOCK)
    if top_p < 1.0:
        target = top_p.to(tl.float64) * mass
        last_rank, above = _cutoff(source, num_tokens, largest, inverse, min_p, floor, target, False, BLOCK)
        last_place = _last_of_equals(source, num_tokens, largest, inverse, last_rank, target - above, BLOCK)
        mass = _total(source, num_tokens, largest, inverse, min_p, floor, last_rank, last_place, BLOCK)

    seed, choice, position = tl.load(seeds_ptr + index), tl.load(choices_ptr + index), tl.load(positions_ptr + index)
    target = _uniform(seed, choice, position, PURPOSE) * mass
    before = tl.zeros((), tl.float64)
    drawn = tl.full((), -1, tl.int32)
    last_possible = tl.full((), -1, tl.int32)
    for begin in range(0, num_tokens, BLOCK):
        place, rank, weight = _weights(source, begin, num_tokens, largest, inverse, min_p, floor, BLOCK)
        kept = ((rank > last_rank) | ((rank == last_rank) & (place <= last_place))) & (weight > 0.0)
        weight = tl.where(kept, weight, 0.0).to(tl.float64)
        after = before + tl.sum(weight, axis=0)
        last_in_block = tl.max(tl.where(kept, place, -1), axis=0)
        if (drawn < 0) & (after > target):
            passed = kept & (before + tl.cumsum(weight, axis=0) > target)
            first = tl.min(tl.where(passed, place, num_tokens), axis=0)
            # The two sums above may differ in the last bit, so that no token of the block passes.
            drawn = tl.where(first < num_tokens, first, last_in_block)
        last_possible = tl.where(last_in_block >= 0, last_in_block, last_possible)
        before = after
    drawn = tl.where(drawn >= 0, drawn, last_possible)
    token = drawn
    if is_narrow:
        token = tl.load(kept_ids + tl.maximum(drawn, 0))
    tl.store(tokens_ptr + index, tl.where(drawn >= 0, token, best).to(tl.int64))


@triton.jit
def _last_of_equals(source, num_tokens, largest, inverse, last_rank, missing, BLOCK: tl.constexpr):
    """The last place of the tokens of rank last_rank that are needed to reach the weight `missing`; at least the first
    one is needed."""
    num_before = tl.zeros((), tl.int32)
    last_place = tl.full((), -1, tl.int32)
    for begin in range(0, num_tokens, BLOCK):
        place, rank, weight = _weights(source, begin, num_tokens, largest, inverse, 0.0, last_rank, BLOCK)
        equal = rank == last_rank
        each = tl.max(tl.where(equal, weight, 0.0), axis=0).to(tl.float64)
        ordinal = num_before + tl.cumsum(equal.to(tl.int32), axis=0)  # 1 for the first of them
        needed = equal & ((ordinal - 1).to(tl.float64) * each < missing)
        needed = needed | (equal & (ordinal == 1))
        last_place = tl.maximum(last_place, tl.max(tl.where(needed, place, -1), axis=0))
        num_before += tl.sum(equal.to(tl.int32), axis=0)
    return last_place
