"""What layers and weights need of a machine: kernels, and memory for tensors. Every kind of machine has its own folder.

No other code asks which machine holds a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardline.kernels.common import CommonKernels
from shardline.kernels.pages import PageOrder
from shardline.kernels.tensors import LatentCache, QuantizedRows


class WeightKernels(Protocol):
    """Kernels for weights in the activations' dtype: layout, packing and products.

    Other formats declare their kernels in their own files (weights.formats), with the same conventions.

    An `_empty` allocates memory for one weight, for `num_matrices` such weights, [num_matrices, ...], or for a `gated`
    pair of weights, [out_features, in_features] each. A `pack` writes rows of a weight (float32 or bfloat16, perhaps
    strided) to their place: from output `first` on, or, in a gated pair, as the gate (half 0) or up (half 1). If a
    product has a `gate`, it names an activation, and the weight is a gated pair.
    """

    def weight_empty(
        self,
        dtype: torch.dtype,
        out_features: int,
        in_features: int,
        *,
        gated: bool = False,
        num_matrices: int | None = None,
    ) -> Tensor: ...
    def pack_weight(self, weight: Tensor, panels: Tensor, first: int = ..., half: int | None = ..., /) -> None: ...
    def unpack_rows(self, panels: Tensor, indices: Tensor, out: Tensor, /) -> None:
        """Unpacked rows of a packed weight to out [len(indices), in_features]."""

    def linear_argmax(
        self, x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, allowed: Tensor | None, /
    ) -> Tensor:
        """See PackedLinear.argmax."""

    def pack_heads(self, weights: Tensor, /) -> Tensor:
        """Pack weights [num_heads, out_features, in_features] for `linear_heads`."""


class Kernels(CommonKernels, WeightKernels, Protocol):
    """All kernels of a back end. The ops document what each kernel computes."""

    def quantized_empty(self, num_rows: int, in_features: int, dtype: torch.dtype, /) -> QuantizedRows:
        """Memory for the quantized rows of activations of `dtype`."""

    def page_order(self, dtype: torch.dtype) -> PageOrder:
        """The order of the KV cache's pages for activations of `dtype`."""

    def write_latent(self, latent: Tensor, rope_key: Tensor, cache: LatentCache, slots: Tensor, /) -> None: ...
    def mla_attention(
        self,
        query_latent: Tensor,
        query_rope: Tensor,
        cache: LatentCache,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        out: Tensor,
        scale: float,
        /,
    ) -> None: ...
    def mla_partials(
        self,
        query_latent: Tensor,
        query_rope: Tensor,
        cache: LatentCache,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        maxima: Tensor,
        sums: Tensor,
        outputs: Tensor,
        scale: float,
        first_split: int,
        split_step: int,
        /,
    ) -> None:
        """What `mla_attention` computes for each of some splits, before it merges them."""

    def route_experts(
        self,
        logits: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        weights: Tensor,
        shared_scale: Tensor | None,
        counts: Tensor | None,
        sigmoid: bool,
        normalized: bool,
        scale: float,
        num_experts: int,
        num_groups: int,
        top_groups: int,
        top2_sum: bool,
        slots: Tensor | None,
        /,
    ) -> None: ...
    def count_exchanged(self, ids: Tensor, token_bounds: list[int], expert_bounds: Tensor, /) -> tuple[Tensor, Tensor]:
        """See ops.moe.exchange.ExchangeCounts; the bounds are in host memory."""

    def penalize(
        self,
        logits: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
        offsets: Tensor,
        ids: Tensor,
        output_counts: Tensor,
        in_prompt: Tensor,
        bias: Tensor,
        uncounted: Tensor | None,
        /,
    ) -> None: ...


@dataclass(frozen=True)
class LoadedProducts:
    """The products of a loaded stage, for a back end that chooses among kernels."""

    shapes: frozenset[tuple[int, int]]
    """[out_features, in_features] of the stage's plain weights."""
    most_rows: int
    dtype: torch.dtype
    exact: bool
    """Whether sums must have one fixed order; else any kernel may be used."""


class ComputeDevice(Protocol):
    """Where the layers of a rank compute."""

    device: torch.device
    fuses_argmax: bool
    """Whether the lm_head itself finds the best token of a greedy step, so that logits are not written."""

    @property
    def kernels(self) -> Kernels:
        """The kernels of this machine."""

    def keep_weight(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a weight, in memory that suits weights which every step reads whole."""

    def pages_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory for the pages of a KV cache; untouched pages take no memory of a host."""
