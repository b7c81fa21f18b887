"""A norm over heads that are divided among ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.models.parts import Norm
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.norm import NormLayer
from shardline.runtime.ops.scale import scale_rows


class AllHeadsNorm:
    """An RMSNorm over all heads of q, or of k, which are divided among the ranks: [T, local columns] -> the same.

    Ranks gather the heads, and each rank normalises whole rows. So one rank adds up a row, in a fixed order.
    """

    def __init__(self, loader: LayerLoader, name: str, norm: Norm, projection: str) -> None:
        """`projection`: the name of the linear whose outputs are normalised."""
        stage = loader.stage
        self._kernels = stage.kernels
        self._group = stage.group
        self._norm = NormLayer(loader, name, norm)
        spans = stage.spans(f"{projection}.weight")
        self._own = spans[stage.group.rank]
        # Of ranks with the same KV heads, only the first one sends them.
        self._widths = [0 if span in spans[:rank] else span.size for rank, span in enumerate(spans)]
        self._one = torch.ones(1, device=stage.device)

    def __call__(self, x: Tensor) -> Tensor:
        if self._group.size == 1:
            return self._norm(x)
        # A gather needs dense rows.
        dense = scale_rows(self._kernels, x[:, : self._widths[self._group.rank]], self._one)
        whole = self._group.all_gather_columns(dense, self._widths)
        return self._norm(whole)[:, self._own.start : self._own.stop]
