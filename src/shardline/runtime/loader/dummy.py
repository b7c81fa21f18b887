"""Random weights for runs without a checkpoint: every rank draws the same values for the same elements."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from shardline.models.parameters import is_kept_in_float32, parameters, parse_name
from shardline.models.partition import Span
from shardline.models.parts import Shape
from shardline.models.sharding import Spans, shard_shape
from shardline.models.spec import DecoderSpec

_SPREAD = 0.02 * math.sqrt(12) / 65536
"""Factor of a uniform 16-bit number, for a standard deviation of 0.02. Uniform numbers are drawn ten times as fast as
normal ones."""
_BLOCK_ELEMENTS = 1 << 16


class DummyWeights:
    """Uniform values of standard deviation 0.02, around 1 for the weights of norms and around 0 elsewhere.

    An element's value depends only on the seed, the parameter's name and the element's place in it, not on the
    requested part. So rows are drawn in blocks, each with its own counter-based generator.
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, seed: int) -> None:
        self._spec = spec
        self._dtype = dtype
        self._seed = seed
        self._shapes = dict(parameters(spec))
        if spec.tied_embeddings:
            self._shapes.setdefault("lm_head.weight", self._shapes["embed.weight"])

    def get(self, name: str, spans: Spans) -> torch.Tensor:
        """See `weights.WeightSource.get`."""
        shape, center = self._shapes[name], np.float32(self._center(name))
        rows = Span(0, shape[0]) if spans[0] is None else spans[0]
        columns = slice(None) if len(spans) == 1 or spans[1] is None else slice(spans[1].start, spans[1].stop)
        dtype = torch.float32 if is_kept_in_float32(name) else self._dtype
        result = torch.empty(shard_shape(shape, spans), dtype=dtype)
        done = 0
        for drawn in self._draw(name, shape, rows):
            values = drawn.astype(np.float32)
            values -= np.float32(32767.5)
            values *= np.float32(_SPREAD)
            values += center
            part = values.reshape(-1, *shape[1:])
            part = part[:, columns] if part.ndim == 2 else part
            result[done : done + len(part)] = torch.from_numpy(part)
            done += len(part)
        return result

    def get_packed(self, name: str, spans: Spans) -> None:
        """See `weights.WeightSource.get_packed`."""

    def is_packed(self, name: str) -> bool:
        """See `weights.WeightSource.is_packed`."""
        return False

    def _draw(self, name: str, shape: Shape, rows: Span) -> Iterator[NDArray[np.uint16]]:
        """Uniform 16-bit numbers for `rows` of a parameter of `shape`; each array has some whole rows, flattened."""
        row_size = math.prod(shape[1:])
        block_rows = max(1, _BLOCK_ELEMENTS // row_size)
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=16).digest()
        key = np.frombuffer(digest, dtype="<u8")
        row = rows.start
        while row < rows.stop:
            block, skipped = divmod(row, block_rows)
            stop = min((block + 1) * block_rows, rows.stop)
            num_drawn = (stop - block * block_rows) * row_size
            words = np.random.Philox(key=key, counter=[0, 0, 0, block]).random_raw(-(-num_drawn // 4))
            yield words.astype("<u8", copy=False).view("<u2")[skipped * row_size : num_drawn]
            row = stop

    def _center(self, name: str) -> float:
        layer, part, kind = parse_name(name)
        if kind == "bias" or not part.endswith("norm"):
            return 0.0
        spec = self._spec
        if layer is not None:
            norm = spec.layers[layer].norm_of(part)
        elif spec.token_input is not None and part.startswith("token_input"):
            norm = spec.token_input.norm
        else:
            norm = spec.final_norm
        assert norm is not None
        return 1.0 - norm.weight_offset


class DeviceDummyWeights(DummyWeights):
    """The same distribution, drawn on a GPU in a thousandth of the time, with other values than the host's.

    A parameter is drawn whole and then cut, so here too every rank has the same values for the same elements.
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, seed: int, device: torch.device) -> None:
        super().__init__(spec, dtype, seed)
        self._device = device

    def get(self, name: str, spans: Spans) -> torch.Tensor:
        """See `weights.WeightSource.get`."""
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little") >> 1)
        drawn = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        center, half = self._center(name), 32768 * _SPREAD
        drawn.uniform_(center - half, center + half, generator=generator)
        parts = [slice(None) if span is None else slice(span.start, span.stop) for span in spans]
        return drawn[tuple(parts)].contiguous()
