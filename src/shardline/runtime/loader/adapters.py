"""Brings an adapter from its files into a slot of the linears that it changes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardline.checkpoints.adapters import LinearChange, read_adapter
from shardline.models.spec import DecoderSpec
from shardline.runtime.loader.weights import mapped_tensor

if TYPE_CHECKING:
    from shardline.models.partition import Span
    from shardline.runtime.layers.context import AdaptedLinear


def load_adapter(
    linears: Iterable[AdaptedLinear], slot: int, folder: Path, digest: str, spec: DecoderSpec, max_rank: int
) -> None:
    """Put the adapter in `folder` into a slot of `linears`.

    Raises:
        ValueError: it cannot be used, or its content is not that of the digest. The slot is empty.
    """
    for linear in linears:
        linear.weights.clear(slot)
    adapter = read_adapter(folder, spec, max_rank)
    if adapter.digest() != digest:
        raise ValueError(f"the adapter in {folder} has changed since it was loaded; load it again under a new name")
    found = {one.name.removesuffix(".weight"): one for one in adapter.linears}
    try:
        for linear in linears:
            for part, (name, span) in enumerate(zip(linear.names, linear.spans, strict=True)):
                if (own := found.get(name)) is not None:
                    down, up = _read(own, span)
                    linear.weights.put(slot, part, down, up, own.scale)
    except ValueError:
        for linear in linears:
            linear.weights.clear(slot)
        raise


def _read(linear: LinearChange, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """down [rank, in] and the rows `span` of up [out, rank], in float32.

    Raises:
        ValueError: they are not finite.
    """
    down = mapped_tensor(linear.down).float()
    up = mapped_tensor(linear.up)[linear.rows][span.start : span.stop].float()
    for tensor in (down, up):
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"the adapter has NaN or Inf in {linear.name.removesuffix('.weight')}")
    return down, up
