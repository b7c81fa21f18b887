"""Trials of attention over pages, of latents too, and of what writes pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.proof.check import ALL, EVEN, Compute, Memory, Outputs, Sizes, Trial, Trials
from shardline.kernels.cuda.proof.rows import rotary_table
from shardline.kernels.cuda.triton import attention as attention_kernels
from shardline.kernels.tensors import QuantizedLatents

_STORED = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn}


class _Cache(NamedTuple):
    """Pages of keys and values, with the scales of bytes."""

    keys: Tensor
    values: Tensor
    scales: tuple[Tensor | None, Tensor | None]

    @property
    def tensors(self) -> Outputs:
        return (self.keys, self.values, *(part for part in self.scales if part is not None))


def _empty_cache(memory: Memory, dtype: torch.dtype, sizes: Sizes, blocks: int) -> _Cache:
    heads, block, dim = sizes["kv_heads"], sizes["block"], sizes["dim"]
    stored = _STORED.get(sizes["kv"], dtype)
    pages = [memory.empty(blocks, heads, block, dim, dtype=stored) for _ in "kv"]
    if stored == dtype:
        return _Cache(pages[0], pages[1], (None, None))
    first, second = (memory.empty(blocks, heads, block, dtype=torch.float32) for _ in "kv")
    return _Cache(pages[0], pages[1], (first, second))


def write_kv(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    """Keys and values into pages; the last token has no slot."""
    heads, dim, block, count = sizes["kv_heads"], sizes["dim"], sizes["block"], 7
    every = memory.numbers(count, 2 * heads, dim, dtype=dtype)
    blocks = -(-2 * count // block)
    slots = memory.place(memory.order(blocks * block)[:count])
    slots[-1] = -1

    def pages(kernels: Any, rows: slice) -> Outputs:
        key, value = every[rows].split_with_sizes([heads, heads], 1)
        value = memory.place(value)  # with another stride
        cache = _empty_cache(memory, dtype, sizes, blocks)
        kernels.write_kv(key, value, cache.keys, cache.values, slots[rows], *cache.scales)
        return cache.tensors

    yield Trial(pages)
    yield Trial(_of_slots(pages, slots, block), EVEN)


def _of_slots(pages: Compute, slots: Tensor, block: int) -> Compute:
    """What lies at the slots of the rows; a row without one stands for the first."""

    def compute(kernels: Any, rows: slice) -> Outputs:
        kept = slots[rows].clamp(min=0)
        found = (page.view(torch.uint8) if page.dtype in _STORED.values() else page for page in pages(kernels, rows))
        return tuple(page[kept // block, :, kept % block] for page in found)

    return compute


def rope(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    """Queries and keys, rotated in place; then keys and values in pages."""
    heads, dim, block, count = sizes["kv_heads"], sizes["dim"], sizes["block"], 7
    every = memory.numbers(count, 4 * heads, dim, dtype=dtype)  # queries, keys, values of one projection
    blocks = -(-2 * count // block)
    slots, positions = memory.place(memory.order(blocks * block)[:count]), memory.below(32, count)
    slots[-1] = -1
    table = rotary_table(memory, sizes["rotary"])

    def rotated(kernels: Any, rows: slice) -> Outputs:
        query, key = memory.place(every[rows])[:, : 3 * heads].split_with_sizes([2 * heads, heads], 1)
        kernels.apply_rope(query, positions[rows], table, sizes["interleaved"])
        kernels.apply_rope(key, positions[rows], table, sizes["interleaved"])
        return query.clone(), key.clone()

    def pages(kernels: Any, rows: slice) -> Outputs:
        query, key, value = memory.place(every[rows]).split_with_sizes([2 * heads, heads, heads], 1)
        cache = _empty_cache(memory, dtype, sizes, blocks)
        place = (cache.keys, cache.values, positions[rows], slots[rows], table, sizes["interleaved"])
        kernels.rope_and_write_kv(query, key, value, *place, *cache.scales)
        return cache.tensors

    def in_two_calls() -> Outputs:
        _, key = rotated(own, ALL)
        cache = _empty_cache(memory, dtype, sizes, blocks)
        own.write_kv(key, every[:, 3 * heads :], cache.keys, cache.values, slots, *cache.scales)
        return cache.tensors

    def query_too(kernels: Any, rows: slice) -> Outputs:
        query, key, value = memory.place(every[rows]).split_with_sizes([2 * heads, heads, heads], 1)
        cache = _empty_cache(memory, dtype, sizes, blocks)
        place = (cache.keys, cache.values, positions[rows], slots[rows], table, sizes["interleaved"])
        kernels.rope_and_write_kv(query, key, value, *place, *cache.scales)
        return query.clone(), key.clone()

    yield Trial(rotated, EVEN)
    yield Trial(query_too, EVEN, lambda: rotated(own, ALL))
    yield Trial(pages, (), in_two_calls)
    yield Trial(_of_slots(pages, slots, block), EVEN)


_CONTEXTS = ((65, 3), (1, 1), (514, 2), (17, 1))
"""For each sequence, its keys and its new tokens. Those of the first end before and behind the end of a tile of 32 or
64 keys: the later ones see it whole, and need no mask there."""
_OF_RANKS = ((1538, 2),)
"""Keys in four splits, so that each of two ranks has two."""


class _Tables(NamedTuple):
    """See `ops.attention.paged.paged_attention`."""

    blocks: Tensor
    starts: Tensor
    lens: Tensor


def _tables(memory: Memory, blocks: Tensor, rows: slice, contexts: Sequence[tuple[int, int]]) -> _Tables:
    """Those of some rows: of all, or of neighbours in one sequence."""
    starts = [0]
    for _, new in contexts:
        starts.append(starts[-1] + new)
    if rows == ALL:
        chosen, lens = list(range(len(contexts))), [context for context, _ in contexts]
    else:
        (index,) = (i for i, start in enumerate(starts[:-1]) if start <= rows.start < starts[i + 1])
        chosen, lens = [index], [contexts[index][0] - (starts[index + 1] - rows.stop)]
        starts = [0, rows.stop - rows.start]
    numbers = (torch.tensor(part, dtype=torch.int32) for part in (starts, lens))
    return _Tables(memory.place(blocks[chosen]), *map(memory.place, numbers))


def _pages_of(memory: Memory, block: int, contexts: Sequence[tuple[int, int]]) -> Tensor:
    """The blocks of each sequence, in a random order: block 0 is nobody's."""
    width = -(-max(context for context, _ in contexts) // block)
    return 1 + memory.order(len(contexts) * width).view(len(contexts), width).int()


def _stored_numbers(memory: Memory, dtype: torch.dtype, kv: str, *sizes: int) -> tuple[Tensor, Tensor | None]:
    """Random elements of a cache, and the scales of bytes, one for each row."""
    values = torch.randn(*sizes, generator=torch.Generator().manual_seed(1))
    if kv not in _STORED:
        return memory.place(values.to(dtype)), None
    values = (32 * values).clamp(-127, 127)
    stored = values.round().to(torch.int8) if kv == "int8" else values.to(torch.float8_e4m3fn)
    return memory.place(stored), memory.place(torch.full(sizes[:-1], 1 / 32) * (1 + torch.rand(sizes[:-1])))


def _short(window: int | None) -> int | None:
    """A window that hides some keys of the contexts, and all those of a tile from one of its rows. Triton compiles the
    same for it: it asks whether 16 divides a number."""
    return window if window is None or window <= 33 else 33 if window % 16 else 32


def attention(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    heads, dim, block, window = sizes["kv_heads"], sizes["dim"], sizes["block"], _short(sizes["window"])
    # The last token of the last one sees the keys up to a split's end, or those of a window from a split's begin on.
    several = (*_CONTEXTS, (attention_kernels.SPLIT_KEYS + (window or 0), 2))
    blocks = _pages_of(memory, block, several + _OF_RANKS)
    shape = (int(blocks.max()) + 1, heads, block, dim)
    (keys, key_scales), (values, value_scales) = (_stored_numbers(memory, dtype, sizes["kv"], *shape) for _ in "kv")
    late = blocks[[0, 2], attention_kernels.SPLIT_KEYS // block :].long()
    (keys if key_scales is None else key_scales)[late] *= 8  # a later split has the largest scores, too
    cache, scales = (keys, values), (key_scales, value_scales)
    curve = (dim**-0.5, window, sizes["softcap"])
    for contexts in (several, _OF_RANKS, tuple((context, 1) for context, _ in several)):
        query = memory.numbers(sum(new for _, new in contexts), heads * sizes["group"], dim, dtype=dtype)

        def attend(
            kernels: Any,
            rows: slice,
            contexts: Sequence[tuple[int, int]] = contexts,
            query: Tensor = query,
            **options: bool,
        ) -> Outputs:
            out = memory.empty(*query[rows].shape, dtype=dtype)
            tables = _tables(memory, blocks, rows, contexts)
            kernels.paged_attention(query[rows], *cache, *tables, out, *curve, *scales, None, False, **options)
            return (out,)

        def in_turn(attend: Any = attend) -> Outputs:
            found: Outputs = attend(attention_kernels, ALL, spread_splits=False)
            return found

        def in_parts(contexts: Sequence[tuple[int, int]] = contexts, query: Tensor = query) -> Outputs:
            """As two ranks that have every other split."""
            splits = 1 + max(context for context, _ in contexts) // attention_kernels.SPLIT_KEYS
            each = -(-splits // 2)
            sums = [memory.empty(2, each, *query.shape[:2], dtype=torch.float32) for _ in range(2)]
            outputs = memory.empty(2, each, *query.shape, dtype=torch.float32)
            tables = _tables(memory, blocks, ALL, contexts)
            for rank in range(2):
                parts: Any = (sums[0][rank], sums[1][rank], outputs[rank], *curve, *scales, False, rank, 2)
                own.attention_partials(query, *cache, *tables, *parts)
            out = memory.empty(*query.shape, dtype=dtype)
            own.merge_partials(sums[0], sums[1], outputs, out, None)
            return (out,)

        if contexts is _OF_RANKS:
            yield Trial(attend, (), in_parts)
        else:
            yield Trial(attend, ((0, 1), (2, 3), (5, 6)) if contexts is several else ((0, 1), (2, 3)))
        if len(query) == len(contexts):
            yield Trial(attend, (), in_turn)


def mla(memory: Memory, own: CudaKernels, dtype: torch.dtype, sizes: Sizes) -> Trials:
    rank, rotary, block, heads = sizes["rank"], sizes["rotary"], sizes["block"], 3
    blocks = _pages_of(memory, block, _CONTEXTS)
    pages = int(blocks.max()) + 1
    values, scales = _stored_numbers(memory, dtype, sizes["kv"], pages, block, rank)
    if scales is None:
        cache: Any = memory.numbers(pages, block, rank + rotary, dtype=dtype)
    else:
        cache = QuantizedLatents(values, memory.numbers(pages, block, rotary, dtype=torch.bfloat16), scales)
    latent = memory.numbers(sum(new for _, new in _CONTEXTS), heads, rank, dtype=dtype)
    rope = memory.numbers(len(latent), heads, 2 * rotary, dtype=dtype)[..., rotary:]

    def attend(kernels: Any, rows: slice) -> Outputs:
        out = memory.empty(*latent[rows].shape, dtype=dtype)
        tables = _tables(memory, blocks, rows, _CONTEXTS)
        kernels.mla_attention(latent[rows], rope[rows], cache, *tables, out, (rank + rotary) ** -0.5)
        return (out,)

    yield Trial(attend, ((0, 1), (2, 3), (5, 6)))
    new = memory.numbers(7, rank + rotary, dtype=dtype)
    slots = memory.place(memory.order(2 * block)[:7] if block > 3 else memory.order(7))
    slots[-1] = -1

    def write(kernels: Any, rows: slice) -> Outputs:
        some = new[rows]
        count = 2 * block if block > 3 else 7
        if scales is None:
            parts = [memory.empty(-(-count // block), block, rank + rotary, dtype=dtype)]
            kernels.write_latent(some[:, :rank], some[:, rank:], parts[0], slots[rows])
        else:
            shapes = ((rank, values.dtype), (rotary, torch.bfloat16))
            parts = [memory.empty(-(-count // block), block, width, dtype=kind) for width, kind in shapes]
            parts.append(memory.empty(-(-count // block), block, dtype=torch.float32))
            kernels.write_latent(some[:, :rank], some[:, rank:], QuantizedLatents(*parts), slots[rows])
        return tuple(part.view(torch.uint8) if part.itemsize == 1 else part for part in parts)

    yield Trial(write)
