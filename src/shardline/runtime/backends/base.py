"""What a back end offers: kernels, memory, step inputs, replay and measuring. A back end is one folder beside this.

The layers, the runner and the weights hold their back end; nothing else asks on which machine a tensor lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

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


class ComputeKernels(Protocol):
    """What computes. The ops say what each kernel computes; here outputs are arguments."""

    def activation_empty(self, dtype: torch.dtype, /, *sizes: int) -> Tensor:
        """An uninitialised tensor that dies within its step."""

    def quantized_empty(self, num_rows: int, in_features: int, dtype: torch.dtype, /) -> QuantizedRows:
        """Room for the quantized rows of activations of `dtype`."""

    def quantize_rows(self, x: Tensor, values: Tensor, scales: Tensor, sums: Tensor, /) -> None: ...
    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor | tuple[Tensor, Tensor, Tensor],
        eps: float,
        weight_offset: float,
        residual: Tensor | None,
        summed: Tensor | None,
        /,
    ) -> None: ...
    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor | tuple[Tensor, Tensor, Tensor],
        eps: float,
        residual: Tensor | None,
        summed: Tensor | None,
        /,
    ) -> None: ...
    def add(self, x: Tensor, y: Tensor, out: Tensor, /) -> None: ...
    def apply_rope(self, x: Tensor, positions: Tensor, table: Tensor, interleaved: bool, /) -> None: ...
    def activation(self, x: Tensor, out: Tensor, name: str, gated: bool, /) -> None: ...
    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
        key_scales: Tensor | None,
        value_scales: Tensor | None,
        /,
    ) -> None: ...
    def rope_and_write_kv(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        positions: Tensor,
        slots: Tensor,
        table: Tensor,
        interleaved: bool,
        key_scales: Tensor | None,
        value_scales: Tensor | None,
        /,
    ) -> None: ...
    def paged_attention(
        self,
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
        key_scales: Tensor | None,
        value_scales: Tensor | None,
        /,
    ) -> None: ...
    def linear_heads(self, x: Tensor, panels: Tensor, out: Tensor, /) -> None: ...
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


class ExpertKernels(Protocol):
    """Mixtures of experts; see ops.moe."""

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
    def expert_up(
        self,
        x: Tensor,
        ids: Tensor,
        first_expert: int,
        compact: bool,
        panels: Tensor,
        scales: Tensor | None,
        activation: str,
        gated: bool,
        out: Tensor,
        /,
    ) -> None: ...
    def expert_down(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        first_expert: int,
        panels: Tensor,
        scales: Tensor | None,
        shared: Tensor | None,
        shared_scale: Tensor | None,
        out: Tensor,
        /,
    ) -> None: ...
    def count_exchanged(self, ids: Tensor, token_bounds: list[int], expert_bounds: Tensor, /) -> tuple[Tensor, Tensor]:
        """See ops.moe.exchange.ExchangeCounts; the bounds are in host memory."""

    def pack_dispatch(self, x: Tensor, ids: Tensor, expert_bounds: Tensor, out: Tensor, /) -> None: ...
    def expert_slots(
        self,
        x: Tensor,
        ids: Tensor,
        first_expert: int,
        panels: Tensor,
        scales: Tensor | None,
        out: Tensor,
        /,
    ) -> None: ...
    def combine_slots(
        self,
        rows: Tensor,
        ids: Tensor,
        slot_weights: Tensor,
        expert_bounds: Tensor,
        shared: Tensor | None,
        shared_scale: Tensor | None,
        out: Tensor,
        /,
    ) -> None: ...


class SamplingKernels(Protocol):
    """From logits to tokens; see ops.sampling."""

    def softcap(self, logits: Tensor, cap: float, /) -> None: ...
    def greedy_argmax(self, logits: Tensor, ids: Tensor, values: Tensor, /) -> None: ...
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
    def logprobs(
        self,
        logits: Tensor,
        chosen: Tensor,
        top_n: int,
        chosen_logprobs: Tensor,
        chosen_ranks: Tensor,
        top_ids: Tensor,
        top_logprobs: Tensor,
        /,
    ) -> None: ...
    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        choices: Tensor,
        positions: Tensor,
        purpose: int,
        tokens: Tensor,
        /,
    ) -> None: ...


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

    def linear(
        self, x: Tensor, panels: Tensor, bias: Tensor | None, out: Tensor, gate: str | None = ..., /
    ) -> None: ...
    def linear_argmax(self, x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, /) -> Tensor:
        """See PackedLinear.argmax."""

    def pack_heads(self, weights: Tensor, /) -> Tensor:
        """Weights [num_heads, out_features, in_features] as `linear_heads` reads them."""


class Kernels(ComputeKernels, ExpertKernels, SamplingKernels, WeightKernels, Protocol):
    """All kernels of a back end."""


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
