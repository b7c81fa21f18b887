"""What a back end offers: kernels, memory, step inputs, replay and measuring. A back end is one folder beside this.

The layers, the runner and the weights hold their back end; nothing else asks on which machine a tensor lies.
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
    from shardline.deployment.messages import MemoryUse
    from shardline.runtime.decoder import DecoderStage
    from shardline.runtime.parallel.collectives import SmallGather
    from shardline.runtime.sampling.inputs import SamplingInput
    from shardline.runtime.sampling.sampler import SamplingPlan
    from shardline.runtime.sequences import SequenceTable, WorkerSequence
    from shardline.runtime.step import StepInput
    from shardline.types import RankStep

LatentCache = Tensor | tuple[Tensor, Tensor, Tensor]
"""A cache of latents: one tensor, or the parts of `ops.attention.kv_cache.QuantizedLatents`."""


class WeightKernels(Protocol):
    """Weights in the activations' dtype: how they are laid out, packed and multiplied.

    Other formats name what they need in their own files (weights.formats), with the same meaning.

    An `_empty` gives room for a weight, for `num_matrices` like it, [num_matrices, ...], or for two that are
    multiplied `gated`, [out_features, in_features] each. A `pack` puts rows of a weight, float32 or bfloat16 and
    perhaps strided, into their place: from output `first` on, or, of a gated pair, into the gate's (half 0) or up's
    (half 1).
    `gate` of a product names an activation, and the weight is such a pair.
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
        """Rows of a packed weight as they were, [len(indices), in_features]."""

    def linear_argmax(self, x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, /) -> Tensor:
        """See PackedLinear.argmax."""

    def pack_heads(self, weights: Tensor, /) -> Tensor:
        """Weights [num_heads, out_features, in_features] as `linear_heads` reads them."""


class Kernels(CommonKernels, WeightKernels, Protocol):
    """All kernels of a back end. The ops say what each computes."""

    def quantized_empty(self, num_rows: int, in_features: int, dtype: torch.dtype, /) -> QuantizedRows:
        """Room for the quantized rows of activations of `dtype`."""

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
    """Counters that kernels raise, for somebody who looks at host memory now and then."""

    counts: Tensor
    """Where the kernels count."""

    def publish_counts(self) -> None:
        """Let the host see them, without waiting for a device."""


class Download(Protocol):
    """What a step computed, on its way to host memory."""

    is_immediate: bool
    """Whether the step was over when the download began."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""

    def wait(self) -> list[Tensor]:
        """The tensors in host memory, once they are there; from any thread."""


@dataclass(frozen=True)
class StepSizes:
    """Bounds of the steps of a rank."""

    max_seqs: int
    max_blocks: int
    """Of a sequence's block table."""
    num_kv_groups: int
    block_size: int
    hidden_size: int
    dtype: torch.dtype


class StepInputs(Protocol):
    """Steps as tensors where the layers compute, and what they sample back in host memory."""

    def make_step(
        self,
        rank_step: RankStep,
        sequences: Sequence[WorkerSequence],
        sampling: SamplingPlan | None,
        greedy: bool,
    ) -> StepInput:
        """The step of a plan, of `sequences`, one for each of its entries."""

    def keep_tokens(self, sampling: SamplingInput, tokens: Tensor) -> None:
        """Remember what was sampled, for a later step that is planned before the host knows the tokens."""

    def download(self, tensors: list[Tensor]) -> Download:
        """Begin to bring tensors to host memory."""


Forward = Callable[["StepInput", Tensor], Tensor]
"""A step and its hidden states [T, H] -> the stage's output."""


class Replay(Protocol):
    """A stage's forward pass that replays decode steps which it has recorded."""

    forward: Forward
    """The pass itself."""

    def __call__(self, step: StepInput, hidden: Tensor) -> Tensor: ...
    def capture_steps(self) -> None:
        """Record beforehand what this back end records beforehand; the KV cache is there."""


class FusedLayers(Protocol):
    """The layers of a stage with fewer launches, for the steps for which that is worth it; with the same bits."""

    def fits_step(self, step: StepInput) -> bool:
        """Whether a step should take these."""

    def __call__(self, step: StepInput, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `DecoderStage.run_layers`."""


@dataclass(frozen=True)
class LoadedProducts:
    """What the products of a loaded stage are, for a back end that chooses among kernels."""

    shapes: frozenset[tuple[int, int]]
    """[out_features, in_features] of its plain weights."""
    most_rows: int
    dtype: torch.dtype
    exact: bool
    """Whether sums must have one order; else any kernel will do."""


class Backend(Protocol):
    """A rank's machine."""

    name: str
    """Of the device, for people."""
    kernel_path: str
    """What a request's bits depend on: the instruction set, or the GPU's generation and the compiler's version."""
    num_threads: int
    """Of the host."""
    device: torch.device
    fuses_argmax: bool
    """Whether a greedy step is sampled by the lm_head itself, so that its logits are never written."""
    overlaps_steps: bool
    """Whether a step can be launched while the previous one still runs."""
    draws_dummy_weights: bool
    """Whether random weights are drawn on the device; else on the host."""

    @property
    def kernels(self) -> Kernels:
        """Those of this machine."""

    def keep_weight(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a weight that every step reads whole, in memory that suits this."""

    def finish_loading(self, products: LoadedProducts) -> None:
        """All weights are packed: give back what loading took, choose among kernels."""

    def share_counters(self, host: Tensor) -> Counters:
        """Counters whose values appear in `host`."""

    def make_step_inputs(self, table: SequenceTable, sizes: StepSizes) -> StepInputs: ...
    def make_replay(self, forward: Forward, sizes: StepSizes, *, can_capture: bool) -> Replay:
        """`can_capture`: whether the stage's exchanges can be part of a recording that does not run Python."""

    def fuse_layers(self, stage: DecoderStage) -> FusedLayers | None:
        """None: the layers one op after another are best for every step."""

    def measure_step(self, run_step: Callable[[], object], replay: Replay) -> MemoryUse:
        """What a rank that holds its weights needs for its largest step, and for the recordings of `replay`."""

    def make_small_gather(self, group: object, timeout: float) -> SmallGather | None:
        """A faster way than torch.distributed's for gathers of few bytes within a group of it; None: there is none."""
