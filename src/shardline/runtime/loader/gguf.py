"""Reads any part of a parameter from a GGUF checkpoint."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from shardline.checkpoints.gguf.checkpoint import FoundPlace, GGUFCheckpoint
from shardline.checkpoints.gguf.header import PLAIN_TYPES, GGUFTensor
from shardline.kernels.memory import mapped_empty
from shardline.kernels.page_cache import copy_rows, map_part
from shardline.models.parameters import is_kept_in_float32, parameters, parse_name
from shardline.models.partition import Span
from shardline.models.sharding import Spans
from shardline.models.spec import DecoderSpec
from shardline.runtime.loader.gguf_blocks import decode_blocks, decode_plain, kind_number
from shardline.runtime.loader.slices import read_in_slices
from shardline.weights.grouped import GroupedWeight, StoredRows, scales_not_finite


class GGUFWeights:
    """Weights of a GGUF checkpoint; only the rows that are asked for are read, when they are asked for."""

    def __init__(self, checkpoint: GGUFCheckpoint, spec: DecoderSpec, dtype: torch.dtype) -> None:
        """`dtype`: type of the returned tensors.

        Raises:
            ValueError: the checkpoint lacks a parameter of `spec`, or one has another shape.
        """
        checkpoint.check(spec)
        self._checkpoint = checkpoint
        self._spec = spec
        self._dtype = dtype
        self._shapes = dict(parameters(spec))

    def get(self, name: str, spans: Spans) -> Tensor:
        """See `weights.WeightSource.get`.

        Raises:
            ValueError: scales of a packed weight are not finite.
        """
        dtype = torch.float32 if is_kept_in_float32(name) else self._dtype
        layer, part, _ = parse_name(name)
        if part == "attention.kv_up" and layer is not None and self._checkpoint.has_split_latents(layer):
            return self._join_latents(layer, spans).to(dtype)
        place = self._find(name)
        if len(self._shapes[name]) == 1:
            rows = spans[0] or Span(0, place.rows)
            return decode_plain(self._stored(place, rows, Span(0, 1)), place.tensor.type)[:, 0].to(dtype)
        if place.tensor.type.name in PLAIN_TYPES:
            rows, columns = self._both(place, spans)
            plain = decode_plain(self._stored(place, rows, columns), place.tensor.type)
            return plain if plain.dtype == dtype else copy_rows(plain, mapped_empty(plain.shape, dtype))
        return self._packed(place, spans).dequantize(dtype)

    def get_packed(self, name: str, spans: Spans) -> GroupedWeight | None:
        """See `weights.WeightSource.get_packed`; raises the same errors as `get`."""
        layer, part, _ = parse_name(name)
        if part == "attention.kv_up" and layer is not None and self._checkpoint.has_split_latents(layer):
            return None
        place = self._find(name)
        return None if place.tensor.type.name in PLAIN_TYPES else self._packed(place, spans)

    def is_packed(self, name: str) -> bool:
        """See `weights.WeightSource.is_packed`."""
        layer, part, _ = parse_name(name)
        if part == "attention.kv_up" and layer is not None and self._checkpoint.has_split_latents(layer):
            return self._checkpoint.tensors[f"blk.{layer}.attn_v_b.weight"].type.name not in PLAIN_TYPES
        return self._find(name).tensor.type.name not in PLAIN_TYPES

    def _find(self, name: str) -> FoundPlace:
        return self._checkpoint.find(name, self._shapes[name], self._spec)

    def _both(self, place: FoundPlace, spans: Spans) -> tuple[Span, Span]:
        """The rows of the parameter, and the columns of the tensor, that `spans` mean."""
        columns = (spans[1] if len(spans) > 1 else None) or Span(0, place.columns)
        first = place.first_column
        return spans[0] or Span(0, place.rows), Span(first + columns.start, first + columns.stop)

    def _packed(self, place: FoundPlace, spans: Spans) -> GroupedWeight:
        rows, columns = self._both(place, spans)
        kind = place.tensor.type
        size = kind.block_elements
        # Numerics "fast" cuts columns, maybe within a block.
        row_columns = place.row_columns or place.columns
        outer = Span(columns.start // size * size, min(-(-columns.stop // size) * size, row_columns))
        inner = slice(columns.start - outer.start, columns.stop - outer.start)

        def read(some: Span) -> GroupedWeight:
            weight = decode_blocks(self._stored(place, some, outer), kind)
            _check_finite(weight, place)
            return weight if outer == columns else _select_columns(weight, inner)

        def read_stored(some: Span) -> StoredRows:
            return StoredRows(self._stored(place, some, outer), kind_number(kind), _name_of(place))

        return read_in_slices(read, rows, outer.size, read_stored if outer == columns and outer.size else None)

    def _stored(self, place: FoundPlace, rows: Span, columns: Span) -> Tensor:
        """[N, bytes] uint8 as the file stores them: the tensor's `columns`, whole blocks, in the parameter's `rows`."""
        tensor = place.tensor
        kind = tensor.type
        width = (place.row_columns or place.columns) // kind.block_elements * kind.block_bytes
        first, last = (bound // kind.block_elements * kind.block_bytes for bound in (columns.start, columns.stop))
        if rows.size == 0 or last == first:
            return torch.empty(rows.size, last - first, dtype=torch.uint8)
        head = place.interleaved_heads
        if not head:
            return _mapped_rows(tensor, place.first_row + rows.start, rows.size, width)[:, first:last]
        # Whole heads are read, and the rows picked from them.
        begin, end = rows.start // head * head, -(-rows.stop // head) * head
        stored = _mapped_rows(tensor, place.first_row + begin, end - begin, width)
        return stored[original_rows(rows, head) - begin, first:last]

    def _join_latents(self, layer: int, spans: Spans) -> Tensor:
        """The up-projection of keys and values, float32, from two tensors: the keys' is transposed in each head."""
        attention = self._spec.layers[layer].attention
        rows, latent = self._shapes[f"layers.{layer}.attention.kv_up.weight"]
        heads, size = attention.num_heads, attention.value_head_dim
        keys = self._whole(f"blk.{layer}.attn_k_b.weight").view(heads, latent, rows // heads - size)
        values = self._whole(f"blk.{layer}.attn_v_b.weight").view(heads, size, latent)
        both = torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
        return both[tuple(slice(None) if span is None else slice(span.start, span.stop) for span in spans)]

    def _whole(self, key: str) -> Tensor:
        """[N, K] float32: a whole tensor with its dims before the last flattened."""
        tensor = self._checkpoint.tensors[key]
        columns = tensor.shape[-1]
        place = FoundPlace(key, tensor, 0, tensor.num_bytes // tensor.row_bytes, columns, 0)
        if tensor.type.name in PLAIN_TYPES:
            return decode_plain(self._stored(place, Span(0, place.rows), Span(0, columns)), tensor.type).float()
        return self._packed(place, (None, None)).dequantize(torch.float32)


def _check_finite(weight: GroupedWeight, place: FoundPlace) -> None:
    scales = weight.scales if weight.scale_levels is None else weight.scale_levels.outer
    mins = weight.mins if weight.min_levels is None else weight.min_levels.outer
    if not bool(torch.isfinite(scales).all()) or (mins is not None and not bool(torch.isfinite(mins).all())):
        raise scales_not_finite(_name_of(place))


def _name_of(place: FoundPlace) -> str:
    return f"{place.tensor.file}: {place.key}"


def original_rows(rows: Span, head_dim: int) -> Tensor:
    """The places in the file of `rows` of q or k. In a head of a file, row 2 i + j is row j * head_dim / 2 + i of the
    model: the pairs that rope rotates together are neighbours."""
    wanted = torch.arange(rows.start, rows.stop)
    head, inside = wanted // head_dim, wanted % head_dim
    return head * head_dim + inside % (head_dim // 2) * 2 + inside // (head_dim // 2)


def _mapped_rows(tensor: GGUFTensor, first_row: int, num_rows: int, row_bytes: int) -> Tensor:
    """[num_rows, row_bytes] uint8 in the file's own pages. They are mapped as long as the tensor lives."""
    stored = map_part(tensor.file, tensor.offset + first_row * row_bytes, num_rows * row_bytes)
    return stored.view(num_rows, row_bytes)


def _select_columns(weight: GroupedWeight, columns: slice) -> GroupedWeight:
    """Some of the columns, with all groups."""
    return replace(
        weight,
        values=weight.values[:, columns].contiguous(),
        group_of=weight.group_of[columns],
        scale_levels=None,
        min_levels=None,
    )
