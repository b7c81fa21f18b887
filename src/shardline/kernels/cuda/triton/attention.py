"""Causal attention over a paged cache on the GPU: prefill, chunked prefill and decode in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from shardline.kernels.cuda.triton.attention_kernel import attention_kernel, merge_kernel, merge_ranks_kernel
from shardline.kernels.cuda.triton.launch import early_options, generation

SPLIT_KEYS = 512
_LATENT_KEYS = 32
"""Keys of a tile of latent attention."""
_LOG2_E = 1.4426950408889634
_ENOUGH_PROGRAMS = 264
"""Two programs for each of an H200's 132 multiprocessors. With fewer programs, each split gets its own program."""
_PART_COLUMNS = 256
"""Columns of an output that one program computes. Several programs share a wider output, and each computes the scores.
This limit lets a program keep its split's output and the merged output of earlier splits in registers."""


_Caches = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Keys, values, the scales of both, and for MLA the rotated parts of queries and keys."""


class _Tile(NamedTuple):
    """Rows of queries that a program has, and how its loop over keys is run."""

    rows: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """Those of a launch."""
        return {"BLOCK_ROWS": self.rows, "num_warps": self.warps, "num_stages": self.stages}


class _Parts(NamedTuple):
    """Where the results of splits go, and which these are; see `ops.attention.paged.Partials`."""

    maxima: Tensor
    sums: Tensor
    outputs: Tensor
    first: int = 0
    step: int = 1


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    out: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    sinks: Tensor | None = None,
    chunked: bool = False,
    *,
    spread_splits: bool | None = None,
) -> None:
    """As `ops.attention.paged.paged_attention`, into out [T, Hq, Dv]; every sequence has at least one query token.

    A sequence of context length 0 (padding of a captured batch) gets zeros. Block tables should be no wider than the
    step's longest context: this code does not wait for the device to find that length. `spread_splits` gives every
    split its own program; by default it is set if there would otherwise be too few programs. The bits are the same.
    """
    assert sinks is None, "see deployment.gpu_support"
    assert not chunked, "see deployment.gpu_support"
    caches = (key_cache, value_cache, key_scales, value_scales, None, None)
    index = (block_tables, query_starts, context_lens)
    _launch(
        query,
        caches,
        index,
        out,
        scale,
        window,
        softcap,
        spread_splits,
        None,
        **_options_of_heads(query, caches, index),
    )


def attention_partials(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    maxima: Tensor,
    sums: Tensor,
    outputs: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    chunked: bool,
    first_split: int,
    split_step: int,
) -> None:
    """As `ops.attention.paged.attention_partials`. Maxima are those of scores times log2(e)."""
    assert not chunked, "see deployment.gpu_support"
    # Tiles that see nothing of a split write nothing.
    maxima.fill_(-torch.inf)
    sums.zero_()
    outputs.zero_()
    caches = (key_cache, value_cache, key_scales, value_scales, None, None)
    index = (block_tables, query_starts, context_lens)
    parts = _Parts(maxima, sums, outputs, first_split, split_step)
    options = _options_of_heads(query, caches, index)
    _launch(query, caches, index, outputs[0], scale, window, softcap, True, parts, **options)


def merge_partials(maxima: Tensor, sums: Tensor, outputs: Tensor, out: Tensor, sinks: Tensor | None) -> None:
    """As `ops.attention.paged.merge_partials`, into out [T, Hq, Dv]."""
    assert sinks is None, "see deployment.gpu_support"
    num_tokens, num_heads, value_dim = out.shape
    if num_tokens == 0:
        return
    merge_ranks_kernel[(num_tokens, num_heads)](
        *(maxima, sums, outputs, out, *maxima.shape[:3], num_heads),
        VALUE_DIM=value_dim,
        VALUE_COLUMNS=triton.next_power_of_2(value_dim),
        num_warps=2,
        **early_options(),
    )


def _options_of_heads(query: Tensor, caches: _Caches, index: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """The options of `_launch` for keys and values of each head."""
    key_cache, value_dim = caches[0], caches[1].shape[3]
    one_token, itemsize = query.shape[0] == index[2].shape[0], query.element_size()
    tile, block_keys = _rows_and_warps(one_token, value_dim, query.dtype), 64 if itemsize == 2 else 32
    if value_dim > 128:
        tiles = (_Tile(64, 8, 2), _Tile(64, 8, 1), _Tile(32, 4, 1)) if itemsize == 2 else (tile, _Tile(16, 4, 1))
        tile = _fitting(tiles, block_keys, key_cache.shape[3], 0, min(_PART_COLUMNS, value_dim), itemsize)
    return {
        "num_kv_heads": key_cache.shape[1],
        "block_size": key_cache.shape[2],
        "BLOCK_KEYS": block_keys,
        "KEY_STRIDE": key_cache.shape[3],
        "VALUE_STRIDE": value_dim,
        "KEY_ROPE_STRIDE": 0,
        **tile.options,
    }


def mla_attention(
    query_latent: Tensor,
    query_rope: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    out: Tensor,
    scale: float,
    *,
    spread_splits: bool | None = None,
) -> None:
    """As `ops.attention.latent.mla_attention`, into out [T, H, R]; otherwise as in `paged_attention`."""
    rank, width = query_latent.shape[2], cache.shape[2]
    caches = (cache, cache, None, None, query_rope, cache[..., rank:])
    index = (block_tables, query_starts, context_lens)
    _launch_mla(query_latent, caches, index, out, scale, spread_splits, KEY_STRIDE=width, KEY_ROPE_STRIDE=width)


def quantized_mla_attention(
    query_latent: Tensor,
    query_rope: Tensor,
    values: Tensor,
    rope_keys: Tensor,
    scales: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    out: Tensor,
    scale: float,
    *,
    spread_splits: bool | None = None,
) -> None:
    """As `mla_attention`, over the parts of QuantizedLatents."""
    caches = (values, values, scales, scales, query_rope, rope_keys)
    strides = {"KEY_STRIDE": values.shape[2], "KEY_ROPE_STRIDE": rope_keys.shape[2]}
    _launch_mla(query_latent, caches, (block_tables, query_starts, context_lens), out, scale, spread_splits, **strides)


def _launch_mla(
    query: Tensor,
    caches: _Caches,
    index: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    scale: float,
    spread_splits: bool | None,
    **strides: int,
) -> None:
    itemsize, rank = query.element_size(), query.shape[2]
    tiles: tuple[_Tile, ...] = (_Tile(16, 4, 2), _Tile(16, 4, 1))
    if itemsize == 2:
        # Narrow tiles are for cores whose instructions have 16 rows.
        tiles = (_Tile(64, 8, 2),) if generation().holds_all_stages else (_Tile(32, 4, 2), _Tile(32, 4, 1), *tiles)
    rope = caches[4]
    assert rope is not None
    tile = _fitting(tiles, _LATENT_KEYS, rank, rope.shape[2], min(_PART_COLUMNS, rank), itemsize)
    _launch(
        query,
        caches,
        index,
        out,
        scale,
        None,
        None,
        spread_splits,
        None,
        num_kv_heads=1,
        block_size=caches[0].shape[1],
        BLOCK_KEYS=_LATENT_KEYS,
        VALUE_STRIDE=strides["KEY_STRIDE"],
        **tile.options,
        **strides,
    )


def _rows_and_warps(one_token: bool, value_dim: int, dtype: torch.dtype) -> _Tile:
    """The tile for heads of up to 128. In bf16 it has 64 rows, the fewest of the instructions for many, so that two
    programs share a multiprocessor: one computes while the other waits."""
    stages = 3 if one_token and value_dim <= 128 else 2
    return _Tile(16 if dtype == torch.float32 else 64, 4, stages)


def _fitting(tiles: Sequence[_Tile], keys: int, key_dim: int, rope_dim: int, columns: int, itemsize: int) -> _Tile:
    """The first tile that fits the shared memory of this generation; if none does, the last one, which will not start.

    Triton's compiler takes so many bytes for wide heads: the queries, and what a loop over tiles of `keys` has loaded
    ahead; or, without that, keys and then values, each with the weights of the tile. All programs of a model have one
    tile, so bits do not depend on the step.
    """
    for tile in tiles:
        queries = tile.rows * (key_dim + rope_dim)
        if tile.stages > 1:
            loaded = (tile.stages - 1) * keys * (key_dim + rope_dim + columns) + tile.rows * keys
        else:
            loaded = max(keys * key_dim, keys * columns + tile.rows * keys)
        if (queries + loaded) * itemsize <= 1024 * generation().shared_kib:
            return tile
    return tiles[-1]


def _launch(
    query: Tensor,
    caches: _Caches,
    index: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    spread_splits: bool | None,
    parts: _Parts | None,
    *,
    num_kv_heads: int,
    block_size: int,
    **options: Any,
) -> None:
    """Into `out`, or, if `parts` are given, into these."""
    num_tokens, num_heads, key_dim = query.shape
    block_tables, query_starts, context_lens = index
    value_dim, num_seqs, rope = out.shape[2], context_lens.shape[0], caches[4]
    if num_tokens == 0:
        return
    group, block_rows = num_heads // num_kv_heads, options["BLOCK_ROWS"]
    one_token = num_tokens == num_seqs
    value_columns = min(_PART_COLUMNS, max(16, triton.next_power_of_2(value_dim)))
    value_parts = triton.cdiv(value_dim, value_columns)
    num_tiles = num_seqs * triton.cdiv(group, block_rows) if one_token else num_tokens * group // block_rows + num_seqs
    num_splits = triton.cdiv(block_tables.shape[1] * block_size, SPLIT_KEYS) if parts is None else len(parts.sums)
    if spread_splits is None:
        spread_splits = num_splits > 1 and num_tiles * num_kv_heads * value_parts < _ENOUGH_PROGRAMS
    merges = spread_splits and parts is None
    if merges:
        shape = num_splits, num_tokens, num_heads
        sums = torch.empty(2, *shape, dtype=torch.float32, device=query.device)
        parts = _Parts(sums[0], sums[1], torch.empty(*shape, value_dim, dtype=torch.float32, device=query.device))
    shared = {"SPLIT": SPLIT_KEYS, "ONE_TOKEN": one_token, "HAS_WINDOW": window is not None, "VALUE_DIM": value_dim}
    attention_kernel[(num_tiles, num_kv_heads * value_parts, num_splits if spread_splits else 1)](
        query,
        *caches,
        *index,
        out if parts is None else parts.outputs,
        None if parts is None else parts.maxima,
        None if parts is None else parts.sums,
        query.stride(0),
        0 if rope is None else rope.stride(0),
        0 if rope is None else rope.stride(1),
        block_tables.stride(0),
        num_seqs,
        num_tokens,
        num_heads,
        num_kv_heads,
        scale,
        window or 0,
        softcap or 0.0,
        0 if parts is None else parts.first,
        1 if parts is None else parts.step,
        GROUP=group,
        KEY_DIM=key_dim,
        ROPE_DIM=0 if rope is None else rope.shape[2],
        BLOCK_SIZE=block_size,
        SPREAD=spread_splits,
        HAS_SOFTCAP=softcap is not None,
        KEY_COLUMNS=max(16, triton.next_power_of_2(key_dim)),
        ROPE_COLUMNS=16 if rope is None else max(16, triton.next_power_of_2(rope.shape[2])),
        VALUE_COLUMNS=value_columns,
        VALUE_PARTS=value_parts,
        LOG2_E=_LOG2_E,
        **shared,
        **options,
        **early_options(),
    )
    if merges:
        assert parts is not None
        merge_kernel[(num_tokens, num_heads)](
            parts.outputs,
            parts.maxima,
            parts.sums,
            out,
            query_starts,
            context_lens,
            num_seqs,
            num_tokens,
            num_heads,
            window or 0,
            VALUE_COLUMNS=triton.next_power_of_2(value_dim),
            num_warps=2,
            **shared,
            **early_options(),
        )
