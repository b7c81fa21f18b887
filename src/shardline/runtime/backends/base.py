"""What a back end offers: kernels, memory, step inputs, replay and measuring. A back end is one folder beside this
file.

The layers, the runner and the weights hold their back end; no other code asks which machine holds a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from shardline.runtime.backends.kernels import CommonKernels
from shardline.weights.rows import QuantizedRows

if TYPE_CHECKING:
    from shardline.deployment.kv_budget import MemoryUse
    from shardline.messages.step import RankStep
    from shardline.runtime.decoder import DecoderStage
    from shardline.runtime.ops.attention.kv_cache import LatentCache
    from shardline.runtime.ops.attention.pages import PageOrder
    from shardline.runtime.parallel.collectives import SmallGather
    from shardline.runtime.sampling.inputs import SamplingInput
    from shardline.runtime.sampling.sampler import SamplingPlan
    from shardline.runtime.sequences import SequenceTable, WorkerSequence
    from shardline.runtime.step import StepInput


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
    def unpack_rows(self, panels: Tensor, indices: Tensor, in_features: int, /) -> Tensor:
        """Unpacked rows of a packed weight, [len(indices), in_features]."""

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


class Counters(Protocol):
    """Counters that kernels increase, and that a reader polls in host memory."""

    counts: Tensor
    """The counters that the kernels increase."""

    def publish_counts(self) -> None:
        """Begin to copy the counters to host memory, without waiting for a device."""


class Download(Protocol):
    """Tensors of a step on their way to host memory."""

    is_immediate: bool
    """Whether the step was over when the download began."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""

    def wait(self) -> list[Tensor]:
        """Wait for the tensors and return them, in host memory; may be called from any thread."""


@dataclass(frozen=True)
class StepSizes:
    """Bounds of the steps of a rank."""

    max_seqs: int
    max_blocks: int
    """Largest number of blocks in a sequence's block table."""
    num_kv_groups: int
    block_size: int
    hidden_size: int
    dtype: torch.dtype


class StepInputs(Protocol):
    """Makes step tensors on the device of the layers, and downloads what the steps sample."""

    def make_step(
        self,
        rank_step: RankStep,
        sequences: Sequence[WorkerSequence],
        sampling: SamplingPlan | None,
        greedy: bool,
    ) -> StepInput:
        """The step of a plan; `sequences` has one sequence for each of the plan's entries."""

    def keep_tokens(self, sampling: SamplingInput, tokens: Tensor) -> None:
        """Keep sampled tokens for later steps, which may be planned before the host knows the tokens."""

    def download(self, tensors: list[Tensor]) -> Download:
        """Begin to copy tensors to host memory."""


Forward = Callable[["StepInput", Tensor], Tensor]
"""A step and its hidden states [T, H] -> the stage's output."""


class Replay(Protocol):
    """A stage's forward pass that replays recorded decode steps."""

    forward: Forward
    """The forward pass itself, without replay."""

    def __call__(self, step: StepInput, hidden: Tensor) -> Tensor: ...
    def capture_steps(self) -> None:
        """Record the steps that this back end records in advance; the KV cache is already allocated."""


class FusedLayers(Protocol):
    """The layers of a stage with fewer kernel launches, for steps that gain from it; the bits are the same."""

    def fits_step(self, step: StepInput) -> bool:
        """Whether a step should use the fused layers."""

    def __call__(self, step: StepInput, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `DecoderStage.run_layers`."""


@dataclass(frozen=True)
class LoadedProducts:
    """The products of a loaded stage, for a back end that chooses among kernels."""

    shapes: frozenset[tuple[int, int]]
    """[out_features, in_features] of the stage's plain weights."""
    most_rows: int
    dtype: torch.dtype
    exact: bool
    """Whether sums must have one fixed order; else any kernel may be used."""


class Backend(Protocol):
    """The machine of one rank."""

    name: str
    """The device's name, for people."""
    kernel_path: str
    """What a request's bits depend on: the instruction set, or the GPU's generation and the compiler's version."""
    num_threads: int
    """Number of host threads."""
    device: torch.device
    fuses_argmax: bool
    """Whether the lm_head itself finds the best token of a greedy step, so that logits are not written."""
    overlaps_steps: bool
    """Whether a step can be launched while the previous one still runs."""
    draws_dummy_weights: bool
    """Whether random weights are drawn on the device; else on the host."""

    @property
    def kernels(self) -> Kernels:
        """The kernels of this machine."""

    def keep_weight(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a weight, in memory that suits weights which every step reads whole."""

    def pages_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory for the pages of a KV cache; untouched pages take no memory of a host."""

    def finish_loading(self, products: LoadedProducts) -> None:
        """Called when all weights are packed: free the memory that only loading needed, and choose among kernels."""

    def share_counters(self, host: Tensor) -> Counters:
        """Counters whose values are published in `host`."""

    def make_step_inputs(self, table: SequenceTable, sizes: StepSizes) -> StepInputs: ...
    def make_replay(self, forward: Forward, sizes: StepSizes, *, can_capture: bool) -> Replay:
        """`can_capture`: whether a recording, which runs no Python, can include the stage's exchanges."""

    def fuse_layers(self, stage: DecoderStage) -> FusedLayers | None:
        """The fused layers of a stage; None: unfused layers are best for every step."""

    def measure_step(self, run_step: Callable[[], object], replay: Replay) -> MemoryUse:
        """The memory that a rank needs beside its weights for its largest step and for the recordings of `replay`."""

    def make_small_gather(self, group: object, timeout: float) -> SmallGather | None:
        """A gather of few bytes within a torch.distributed group that is faster than torch.distributed's; None: there
        is none."""
