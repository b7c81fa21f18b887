"""The attention kernels, for keys and values of each head, or for latents that all heads share (MLA).

A program takes a tile of query rows of one sequence that share a KV head (row r is token r // group, head r % group).
Keys are cut into splits of 512 that are anchored at absolute position. Within a split, tiles of BLOCK_KEYS, anchored in
the same way, pass through an online softmax (Milakov and Gimelshein, 2018). Splits are merged in index order, in fp32.
If a row sees no key of a tile or split, that tile or split does not change the row by a bit. So a row does not depend
on the rows beside it, and one program may take all splits in turn, or each split may have its own program (flash
decoding; Dao et al., 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardline.kernels.cuda.triton.launch import begin_early
from shardline.kernels.cuda.triton.softcap import tanh


@triton.jit
def _sequence_of(index, query_starts_ptr, num_seqs, SCALE: tl.constexpr, DIVISOR: tl.constexpr, PER_SEQUENCE):
    """The last sequence s with query_starts[s] * SCALE // DIVISOR + s * PER_SEQUENCE <= index."""
    low, high = 0, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_starts_ptr + middle) * SCALE // DIVISOR + middle * PER_SEQUENCE <= index:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _merge(largest, total, output, split_largest, split_total, split_output):
    """Merge the next split into the result so far: (largest, total, output) of both."""
    larger = tl.maximum(largest, split_largest)
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    keep, take = tl.exp2(largest - shift), tl.exp2(split_largest - shift)
    total = tl.fma(split_total, take, total * keep)
    keep, take = tl.broadcast_to(keep[:, None], output.shape), tl.broadcast_to(take[:, None], output.shape)
    return larger, total, tl.fma(split_output, take, output * keep)


@triton.jit
def _finish(output, total):
    """The weighted mean; zeros for rows that see nothing."""
    total = tl.where(total == 0.0, 1.0, total)
    return tl.div_rn(output, tl.broadcast_to(total[:, None], output.shape))


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride", "first_part", "part_step"])
def attention_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scales_ptr,
    value_scales_ptr,
    query_rope_ptr,
    key_rope_ptr,
    block_tables_ptr,
    query_starts_ptr,
    context_lens_ptr,
    out_ptr,
    maxima_ptr,
    sums_ptr,
    query_stride,
    rope_stride,
    rope_head_stride,
    table_stride,
    num_seqs,
    num_tokens,
    num_heads,
    num_kv_heads,
    scale,
    window,
    softcap,
    first_part,
    part_step,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    KEY_ROPE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    SPREAD: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    ROPE_COLUMNS: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    LOG2_E: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """See `attention` for the arguments' shapes. A program computes some columns of the output, in the same way in all
    parts."""
    begin_early(IS_EARLY)
    tile, kv_head, part = tl.program_id(0), tl.program_id(1) // VALUE_PARTS, tl.program_id(2)
    value_part = tl.program_id(1) % VALUE_PARTS
    if ONE_TOKEN:
        TILES: tl.constexpr = (GROUP + BLOCK_ROWS - 1) // BLOCK_ROWS
        sequence, first_row = tile // TILES, tile % TILES * BLOCK_ROWS
        first_token, num_rows = sequence, GROUP
    else:
        sequence = _sequence_of(tile, query_starts_ptr, num_seqs, GROUP, BLOCK_ROWS, 1)
        first_token = tl.load(query_starts_ptr + sequence)
        num_rows = (tl.load(query_starts_ptr + sequence + 1) - first_token) * GROUP
        first_row = (tile - (first_token * GROUP // BLOCK_ROWS + sequence)) * BLOCK_ROWS
        if first_row >= num_rows:
            return
    context_len = tl.load(context_lens_ptr + sequence)
    row = first_row + tl.arange(0, BLOCK_ROWS)
    row_inside = row < num_rows
    token, head = first_token + row // GROUP, kv_head * GROUP + row % GROUP
    first_position = context_len - num_rows // GROUP
    # Rows past the end take the last row's position, so that they do not widen the range of keys.
    position = first_position + tl.minimum(row, num_rows - 1) // GROUP

    end_key = tl.max(position, axis=0) + 1
    whole_keys = tl.min(position, axis=0) + 1
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(tl.min(position, axis=0) - window + 1, 0)
    first_split, end_split = first_key // SPLIT, tl.cdiv(end_key, SPLIT)
    if SPREAD:
        split_of_part = first_part + part * part_step
        if (split_of_part < first_split) | (split_of_part >= end_split):
            return
        first_split, end_split = split_of_part, split_of_part + 1

    column = tl.arange(0, KEY_COLUMNS)
    query_place = query_ptr + token.to(tl.int64)[:, None] * query_stride + head[:, None] * KEY_DIM + column[None, :]
    query = tl.load(query_place, mask=row_inside[:, None] & (column[None, :] < KEY_DIM), other=0.0)
    if ROPE_DIM > 0:
        rope_column = tl.arange(0, ROPE_COLUMNS)
        rope_inside = rope_column < ROPE_DIM
        rope_row = query_rope_ptr + token.to(tl.int64) * rope_stride + head * rope_head_stride
        rope_mask = row_inside[:, None] & rope_inside[None, :]
        query_rope = tl.load(rope_row[:, None] + rope_column[None, :], mask=rope_mask, other=0.0)
    value_column = value_part * VALUE_COLUMNS + tl.arange(0, VALUE_COLUMNS)
    table = block_tables_ptr + sequence.to(tl.int64) * table_stride

    largest = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    output = tl.zeros((BLOCK_ROWS, VALUE_COLUMNS), tl.float32)
    for split in range(first_split, end_split):
        split_largest = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        split_total = tl.zeros((BLOCK_ROWS,), tl.float32)
        split_output = tl.zeros((BLOCK_ROWS, VALUE_COLUMNS), tl.float32)
        begin = tl.maximum(split * SPLIT, first_key // BLOCK_KEYS * BLOCK_KEYS)
        end = tl.minimum(split * SPLIT + SPLIT, end_key)
        # Tiles that all rows see whole need no masks, which change no bit of them.
        end_whole = begin
        if not HAS_WINDOW:
            end_whole = tl.maximum(begin, tl.minimum(end, whole_keys // BLOCK_KEYS * BLOCK_KEYS))
        for phase in tl.static_range(1 if HAS_WINDOW else 0, 2):
            if phase == 0:
                first, stop = begin, end_whole
            else:
                first, stop = end_whole, end
            for tile_begin in range(first, stop, BLOCK_KEYS):
                key_position = tile_begin + tl.arange(0, BLOCK_KEYS)
                if phase == 0:
                    key_inside = tl.full((BLOCK_KEYS,), True, tl.int1)
                else:
                    key_inside = (key_position >= first_key) & (key_position < end_key)
                block = tl.load(table + key_position // BLOCK_SIZE, mask=key_inside, other=0).to(tl.int64)
                slot = (block * num_kv_heads + kv_head) * BLOCK_SIZE + key_position % BLOCK_SIZE
                key_row = key_cache_ptr + slot * KEY_STRIDE
                key_inside_head = key_inside[None, :] & (column[:, None] < KEY_DIM)
                key = tl.load(key_row[None, :] + column[:, None], mask=key_inside_head, other=0.0)
                score = tl.dot(query, key.to(query.dtype), input_precision="ieee")
                if key_scales_ptr is not None:
                    score = score * tl.load(key_scales_ptr + slot, mask=key_inside, other=0.0)[None, :]
                if ROPE_DIM > 0:
                    key_rope_row = key_rope_ptr + slot * KEY_ROPE_STRIDE
                    key_inside_rope = key_inside[None, :] & rope_inside[:, None]
                    key_rope = tl.load(key_rope_row[None, :] + rope_column[:, None], mask=key_inside_rope, other=0.0)
                    score = tl.dot(query_rope, key_rope.to(query.dtype), score, input_precision="ieee")
                if HAS_SOFTCAP:
                    capped = tanh(tl.div_rn(score * scale, tl.full(score.shape, softcap, tl.float32)))
                    score = capped * (softcap * LOG2_E)
                else:
                    score = score * (scale * LOG2_E)
                if phase == 1:
                    sees = key_inside[None, :] & (key_position[None, :] <= position[:, None])
                    if HAS_WINDOW:
                        sees = sees & (key_position[None, :] > position[:, None] - window)
                    score = tl.where(sees, score, float("-inf"))
                larger = tl.maximum(split_largest, tl.max(score, axis=1))
                shift = tl.where(larger == float("-inf"), 0.0, larger)
                weight = tl.exp2(score - shift[:, None])
                keep = tl.exp2(split_largest - shift)
                split_total = tl.fma(split_total, keep, tl.sum(weight, axis=1))
                if value_scales_ptr is not None:
                    value_scale = tl.load(value_scales_ptr + slot, mask=key_inside, other=0.0)
                    # Hidden keys may have no scale.
                    weight = tl.where(weight == 0.0, 0.0, weight * value_scale[None, :])
                value_place = value_cache_ptr + slot[:, None] * VALUE_STRIDE + value_column[None, :]
                value = tl.load(value_place, mask=key_inside[:, None] & (value_column[None, :] < VALUE_DIM), other=0.0)
                value = value.to(query.dtype)
                split_output = split_output * keep[:, None]
                split_output = tl.dot(weight.to(value.dtype), value, split_output, input_precision="ieee")
                split_largest = larger
        if SPREAD:
            largest, total, output = split_largest, split_total, split_output
        else:
            largest, total, output = _merge(largest, total, output, split_largest, split_total, split_output)

    inside = row_inside[:, None] & (value_column[None, :] < VALUE_DIM)
    place = token.to(tl.int64) * num_heads + head
    if SPREAD:
        place += part.to(tl.int64) * num_tokens * num_heads
        is_first = row_inside & (value_part == 0)
        tl.store(maxima_ptr + place, largest, mask=is_first)
        tl.store(sums_ptr + place, total, mask=is_first)
    else:
        output = _finish(output, total)
    out_place = out_ptr + place[:, None] * VALUE_DIM + value_column[None, :]
    tl.store(out_place, output.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def merge_kernel(
    outputs_ptr,
    maxima_ptr,
    sums_ptr,
    out_ptr,
    query_starts_ptr,
    context_lens_ptr,
    num_seqs,
    num_tokens,
    num_heads,
    window,
    VALUE_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    begin_early(IS_EARLY)
    token, head = tl.program_id(0), tl.program_id(1)
    if ONE_TOKEN:
        position = tl.load(context_lens_ptr + token) - 1
    else:
        sequence = _sequence_of(token, query_starts_ptr, num_seqs, 1, 1, 0)
        end_token = tl.load(query_starts_ptr + sequence + 1)
        position = tl.load(context_lens_ptr + sequence) - (end_token - token)
    first_split = 0
    if HAS_WINDOW:
        first_split = tl.maximum(position - window + 1, 0) // SPLIT
    column = tl.arange(0, VALUE_COLUMNS)[None, :]
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    output = tl.zeros((1, VALUE_COLUMNS), tl.float32)
    one = tl.arange(0, 1)
    for split in range(first_split, tl.cdiv(position + 1, SPLIT)):
        place = (token.to(tl.int64) + split * num_tokens) * num_heads + head
        split_largest = tl.load(maxima_ptr + place + one)
        split_total = tl.load(sums_ptr + place + one)
        split_output = tl.load(outputs_ptr + place * VALUE_DIM + column, mask=column < VALUE_DIM, other=0.0)
        largest, total, output = _merge(largest, total, output, split_largest, split_total, split_output)
    out_place = out_ptr + (token.to(tl.int64) * num_heads + head) * VALUE_DIM + column
    tl.store(out_place, _finish(output, total).to(out_ptr.dtype.element_ty), mask=column < VALUE_DIM)


@triton.jit(do_not_specialize=["num_ranks", "num_splits", "num_tokens"])
def merge_ranks_kernel(
    maxima_ptr,
    sums_ptr,
    outputs_ptr,
    out_ptr,
    num_ranks,
    num_splits,
    num_tokens,
    num_heads,
    VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """As `merge_kernel`, for splits that lie at the ranks that computed them; see `ops.attention.paged.Partials`."""
    begin_early(IS_EARLY)
    row = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    column = tl.arange(0, VALUE_COLUMNS)[None, :]
    largest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    output = tl.zeros((1, VALUE_COLUMNS), tl.float32)
    one = tl.arange(0, 1)
    for split in range(num_ranks * num_splits):
        place = (split % num_ranks * num_splits + split // num_ranks) * num_tokens * num_heads + row
        split_largest = tl.load(maxima_ptr + place + one)
        split_total = tl.load(sums_ptr + place + one)
        split_output = tl.load(outputs_ptr + place * VALUE_DIM + column, mask=column < VALUE_DIM, other=0.0)
        largest, total, output = _merge(largest, total, output, split_largest, split_total, split_output)
    out_place = out_ptr + row * VALUE_DIM + column
    tl.store(out_place, _finish(output, total).to(out_ptr.dtype.element_ty), mask=column < VALUE_DIM)
