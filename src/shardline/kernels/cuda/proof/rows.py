"""Trials of what is computed row by row: norms, activations, rotation, routing and what becomes of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.proof.check import ALL, EVEN, MakeTrials, Memory, Outputs, Sizes, Trial, Trials, product


def quantize_rows(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    x = with_extremes(memory.numbers(8, sizes["width"] + 16, dtype=dtype)[:, 16:])

    def compute(kernels: Any, rows: slice) -> Outputs:
        values, scales, sums = _quantized(memory, own, len(x[rows]), sizes["width"])
        kernels.quantize_rows(x[rows], values, scales, sums)
        return values, scales, scales == 0.0

    yield Trial(compute, EVEN)


def with_extremes(x: Tensor) -> Tensor:
    """Rows, of which four are now not finite, too small to be quantized, and hardly large enough."""
    x[3, -1], x[4, 0] = torch.nan, torch.inf
    x[5] *= 1e-37 / x[5].abs().max()
    x[6] *= 1e-35 / x[6].abs().max()
    return x


def _quantized(memory: Memory, own: CudaKernels, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    like = own.quantized_empty(rows, width, torch.float32)
    values, scales = memory.empty(*like.values.shape, dtype=torch.int8), memory.empty(rows, dtype=torch.float32)
    return values, scales, like.sums


def norm(*, rms: bool) -> MakeTrials:
    def trials(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
        width, eps = sizes["width"], sizes["eps"]
        x, residual = (memory.numbers(5, width, dtype=dtype) for _ in range(2))
        x[0] *= eps**0.5  # so that eps is seen
        heads = memory.numbers(5, 4, width, dtype=dtype)[:, 1:3]
        weight = memory.numbers(width, dtype=dtype)
        bias = None if rms or not sizes["bias"] else memory.numbers(width, dtype=dtype)

        def norm(kernels: Any, x: Tensor, out: Any, residual: Tensor | None, summed: Tensor | None) -> None:
            if rms:
                kernels.rms_norm(x, weight, out, eps, sizes["offset"], residual, summed)
            else:
                kernels.layer_norm(x, weight, bias, out, eps, residual, summed)

        def added(kernels: Any, rows: slice) -> Outputs:
            out, summed = (memory.empty(len(x[rows]), width, dtype=dtype) for _ in range(2))
            norm(kernels, x[rows], out, residual[rows], summed)
            return out, summed

        def alone(kernels: Any, rows: slice) -> Outputs:
            out = memory.empty(len(x[rows]), width, dtype=dtype)
            norm(kernels, x[rows], out, None, None)
            return (out,)

        def of_heads(kernels: Any, rows: slice) -> Outputs:
            out = memory.empty(*heads[rows].shape, dtype=dtype)
            norm(kernels, heads[rows], out, None, None)
            return (out,)

        def quantized(kernels: Any, rows: slice) -> Outputs:
            out = _quantized(memory, own, len(x[rows]), width)
            norm(kernels, x[rows], out, None, None)
            return out[:2]

        def in_two_calls() -> Outputs:
            out, (normed,) = _quantized(memory, own, len(x), width), alone(own, ALL)
            own.stand_ins.quantize_rows(normed, *out)
            return out[:2]

        yield Trial(added, EVEN)
        yield Trial(alone, EVEN)
        yield Trial(of_heads, EVEN)
        if sizes["quantized"]:
            yield Trial(quantized, EVEN, in_two_calls)

    return trials


def add(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    x, y = (memory.numbers(5, sizes["width"], dtype=dtype) for _ in range(2))

    def compute(kernels: Any, rows: slice) -> Outputs:
        out = memory.empty(*x[rows].shape, dtype=dtype)
        kernels.add(x[rows], y[rows], out)
        return (out,)

    yield Trial(compute, EVEN)


def activation(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    width = 1100  # more than a program has
    x = memory.numbers(5, 2 * width if sizes["gated"] else width, dtype=dtype)

    def call(kernels: Any, x: Tensor, out: Tensor) -> None:
        kernels.activation(x, out, sizes["activation"], sizes["gated"])

    yield Trial(product(memory, x, width, dtype, call), EVEN)


def rotary_table(memory: Memory, rotary: int) -> Tensor:
    """Cosines and sines of 32 positions."""
    angles = torch.outer(torch.arange(32.0), 100.0 ** -torch.linspace(0, 1, rotary // 2))
    return memory.place(torch.cat([angles.cos(), angles.sin()], 1))


def rotate(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    """A part of each head of latent attention's queries."""
    dim, rotary = sizes["dim"], sizes["rotary"]
    every, positions = memory.numbers(7, 3, dim, dtype=dtype), memory.below(32, 7)
    table = rotary_table(memory, rotary)

    def rotated(kernels: Any, rows: slice) -> Outputs:
        own_rows = memory.place(every[rows])
        kernels.apply_rope(own_rows[..., dim - rotary :], positions[rows], table, sizes["interleaved"])
        return (own_rows,)

    yield Trial(rotated, EVEN)


def route(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    count, chosen, experts = 24, sizes["chosen"], sizes["experts"]
    logits = memory.numbers(count, experts + 1, dtype=torch.float32)
    bias = memory.numbers(experts, dtype=torch.float32) if sizes["bias"] else None
    logits[4, : experts if sizes["sigmoid"] else 1] = torch.nan  # no score is a number: the lowest ids
    slots = memory.below(9, count)
    slots[3], slots[-1] = -1, -1
    rest = (experts, sizes["groups"], sizes["top_groups"], sizes["top2_sum"])

    def choose(kernels: Any, rows: slice) -> tuple[Outputs, Tensor]:
        some = logits[rows]
        ids, weights = (
            memory.empty(len(some), chosen, dtype=torch.int32),
            memory.empty(len(some), chosen, dtype=torch.float32),
        )
        gate = memory.empty(len(some), dtype=torch.float32)
        counts = memory.empty(experts, dtype=torch.int64).zero_()
        shape = (sizes["sigmoid"], sizes["normalized"], 1.5, *rest, slots[rows])
        kernels.route_experts(some, bias, ids, weights, gate, counts, *shape)
        if kernels is own.stand_ins:  # they do not know padding
            ids[slots[rows] < 0] = -1
            counts.copy_(torch.bincount(ids[ids >= 0], minlength=experts))
        return (ids, weights, gate), counts

    yield Trial(lambda kernels, rows: choose(kernels, rows)[0], EVEN)
    yield Trial(lambda kernels, rows: (choose(kernels, rows)[1],))


def _logits(memory: Memory, sizes: Sizes, count: int = 6) -> Tensor:
    """Strided rows."""
    return memory.numbers(count, sizes["vocabulary"] + 16, dtype=torch.float32).mul_(3)[:, 16:]


def greedy_argmax(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    logits = _logits(memory, sizes).round_()  # with ties
    logits[1, 0], logits[2, -1], logits[3, 0] = torch.nan, 99.0, 99.0

    def compute(kernels: Any, rows: slice) -> Outputs:
        count = len(logits[rows])
        ids, values = memory.empty(count, dtype=torch.int64), memory.empty(count, dtype=torch.float32)
        kernels.greedy_argmax(logits[rows], ids, values)
        return ids, values

    yield Trial(compute, EVEN)


Arguments = Callable[[Any, slice], Sequence[Any]]
"""Kernels and some rows -> what these kernels get besides the logits of these rows."""


def in_place(name: str, arguments: Callable[[Memory, Sizes, int, int], Arguments]) -> MakeTrials:
    """Kernels that change logits. `arguments` is called with the numbers of rows and of logits."""

    def trials(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
        logits = _logits(memory, sizes)
        rest = arguments(memory, sizes, *logits.shape)

        def compute(kernels: Any, rows: slice) -> Outputs:
            out = memory.empty(*logits[rows].shape, dtype=torch.float32).copy_(logits[rows])
            getattr(kernels, name)(out, *rest(kernels, rows))
            return (out,)

        yield Trial(compute, EVEN)

    return trials


def mask_arguments(memory: Memory, sizes: Sizes, count: int, vocabulary: int) -> Arguments:
    words = memory.below(1 << 32, count, 2 * -(-vocabulary // 64)).int()
    return lambda kernels, rows: (
        torch.arange(len(words[rows]), device=memory.device).flip(0),
        memory.place(words[rows].flip(0)),
    )


def penalties(memory: Memory, sizes: Sizes, count: int, vocabulary: int) -> Arguments:
    """Most rows have 10 entries, one has none and one those of two blocks; some of their newest tokens have one. Ids
    outside the vocabulary are for kernels that ignore them: torch's do not."""
    repetition = 1 + memory.numbers(count, dtype=torch.float32).abs()
    presence, frequency = (memory.numbers(count, dtype=torch.float32) for _ in range(2))
    lengths = [10, min(257, vocabulary), 0, *[10] * (count - 3)]
    ids = torch.cat([memory.order(vocabulary)[:length] for length in lengths]).int()
    newest = memory.below(vocabulary, count)
    newest[:2], newest[-2], newest[-1] = ids[torch.tensor([3, 13])].long(), vocabulary, -1
    ids[5], ids[-2] = vocabulary, vocabulary
    counts, in_prompt = memory.below(3, len(ids), dtype=torch.int32), memory.below(2, len(ids)).bool()
    bias, ids = memory.numbers(len(ids), dtype=torch.float32), memory.place(ids)
    owner = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths)).to(memory.device)

    def of_rows(kernels: Any, rows: slice) -> Sequence[Any]:
        first, end, _ = rows.indices(count)
        kept = (owner >= first) & (owner < end) & ((ids < vocabulary) | isinstance(kernels, CudaKernels))
        offsets = torch.zeros(end - first + 1, dtype=torch.int32, device=memory.device)
        offsets[1:] = torch.bincount(owner[kept] - first, minlength=end - first).cumsum(0)
        entries = [memory.place(part[kept]) for part in (ids, counts, in_prompt, bias)]
        return (repetition[rows], presence[rows], frequency[rows], offsets, *entries, newest[rows])

    return of_rows


def sample(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    """Rows 8 to 10 have four equal largest logits, of which top_p keeps two; rows 11 and 12 too, zeros of both signs,
    of which top_k, which is 2, keeps all. The last row is so flat that top_p keeps most of the vocabulary."""
    count = 14
    logits = memory.numbers(count, sizes["vocabulary"] + 16, dtype=torch.float32)[:, 16:]
    logits[8:11, [7, 60, 150, -1]], logits[-1] = 9.0, logits[-1] / 100
    logits[11:13] -= 9.0
    logits[11:13, [7, 150]], logits[11:13, [60, -1]] = 0.0, -0.0
    temperature, top_p, min_p = (
        memory.place(torch.tensor(part))
        for part in (
            [0.0, 1.0, 0.7, 1.3, 1.0, 0.9, 1.0, 2.0] + [1.0] * 6,
            [1.0, 1.0, 0.8, 1.0, 0.9, 0.5, 1.0, 1.0] + [0.5] * 3 + [1.0] * 2 + [0.95],
            [0.0] * 3 + [0.1] + [0.0] * 2 + [0.2] + [0.0] + [0.5] * 3 + [0.0] * 3,
        )
    )
    top_k = memory.place(torch.tensor([0, 0, 0, 7, 20, 0, 0, 3] + [0] * 3 + [2] * 2 + [0], dtype=torch.int32))
    seeds, choices, positions = (memory.below(1 << 40, count), memory.below(4, count), memory.below(1 << 40, count))

    def compute(kernels: Any, rows: slice) -> Outputs:
        tokens = memory.empty(len(logits[rows]), dtype=torch.int64)
        parts = (temperature, top_k, top_p, min_p, seeds, choices, positions)
        kernels.sample(logits[rows], *(part[rows] for part in parts), 1, tokens)
        return (tokens,)

    yield Trial(compute, EVEN)


def logprobs(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    logits, top = _logits(memory, sizes), 5
    chosen = memory.below(sizes["vocabulary"], len(logits))

    def compute(kernels: Any, rows: slice) -> Outputs:
        count = len(logits[rows])
        own_logprobs, ranks = memory.empty(count, dtype=torch.float32), memory.empty(count, dtype=torch.int64)
        ids, logprobs = memory.empty(count, top, dtype=torch.int64), memory.empty(count, top, dtype=torch.float32)
        kernels.logprobs(logits[rows], chosen[rows], top, own_logprobs, ranks, ids, logprobs)
        return own_logprobs, ranks, ids, logprobs

    yield Trial(compute, EVEN)


def row_digests(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    logits = _logits(memory, sizes)

    def compute(kernels: Any, rows: slice) -> Outputs:
        digests = memory.empty(len(logits[rows]), dtype=torch.int64)
        kernels.row_digests(logits[rows], digests)
        return (digests,)

    yield Trial(compute, EVEN)
