"""From a DecoderSpec to the modules of one pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shardline.kernels.tensors import InputForm, LinearInput, as_tensor
from shardline.models.attention import GQA, MLA, Attention
from shardline.models.feed_forward import MoE
from shardline.models.kv_groups import last_storing_layer, storing_layer
from shardline.models.parameters import embeds_tokens
from shardline.models.partition import Span
from shardline.models.parts import Norm
from shardline.runtime.layers.attention import AttentionLayer, RotaryTables
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.feed_forward import DenseFeedForward
from shardline.runtime.layers.mla import LatentAttentionLayer
from shardline.runtime.layers.moe import MoEFeedForward
from shardline.runtime.layers.norm import InputNorm, NoNorm, NormLayer
from shardline.runtime.layers.token_input import TokenInputBlock, TokenInputs
from shardline.runtime.layers.vocabulary import LMHead, TokenEmbedding
from shardline.runtime.ops.add import add
from shardline.runtime.ops.scale import scale_rows
from shardline.runtime.step import Queries, StepInput


class DecoderLayer:
    """One layer. The residual stream travels as (hidden, delta): the next norm that reads it adds `delta`."""

    def __init__(self, loader: LayerLoader, index: int, tables: RotaryTables, place: int) -> None:
        """`index`: number of the layer in the model; `place`: its number in the stage."""
        stage = loader.stage
        name, spec = f"layers.{index}", stage.spec.layers[index]
        self._storing = storing_layer(stage.spec, index)
        self._kv_group = next(g for g, group in enumerate(stage.kv_groups) if self._storing in group.layers)
        self._kernels = stage.kernels
        last_storing = last_storing_layer(stage.spec)
        self.selects = index == last_storing
        """Whether this layer drops the tokens that are not sampled, once their keys and values are stored."""
        self._sampled_only = index >= last_storing
        self.attention = _attention(loader, f"{name}.attention", spec.attention, tables)
        self.feed_forward: DenseFeedForward | MoEFeedForward
        if isinstance(spec.feed_forward, MoE):
            self.feed_forward = MoEFeedForward(loader, index, spec.feed_forward)
        else:
            self.feed_forward = DenseFeedForward(loader, f"{name}.feed_forward", spec.feed_forward)
        self.parallel = spec.parallel
        # Rows of an input for both blocks are selected between them, so they are not quantized yet.
        form: InputForm = "tensor" if spec.parallel else self.attention.input_form
        self.attention_norm = _input_norm(loader, f"{name}.attention_norm", spec.attention_norm, form)
        self.feed_forward_norm = _input_norm(
            loader, f"{name}.feed_forward_norm", spec.feed_forward_norm, self.feed_forward.input_form
        )
        self._token_input: TokenInputBlock | None = None
        if spec.token_input is not None:
            self._token_input = TokenInputBlock(loader, f"{name}.token_input", spec.token_input)
        self._index, self._place = index, place
        self._output_factor = loader.load(f"{name}.output_scale.bias") if spec.output_scale else None
        self._residual_factor: Tensor | None = None
        if spec.residual_scale != 1.0:
            self._residual_factor = torch.tensor([spec.residual_scale], device=stage.device)

        def optional(part: str, norm: Norm | None) -> NormLayer | None:
            return NormLayer(loader, f"{name}.{part}", norm) if norm else None

        self.post_attention_norm = optional("post_attention_norm", spec.post_attention_norm)
        self.post_feed_forward_norm = optional("post_feed_forward_norm", spec.post_feed_forward_norm)

    def __call__(self, hidden: Tensor, delta: Tensor | None, step: StepInput) -> tuple[Tensor, Tensor | None]:
        """hidden, delta [T, H] -> the same after this layer; the one that `selects` returns only the sampled rows."""
        normed, hidden = self.attention_norm(hidden, delta)
        queries, slots = self.queries_and_slots(step)
        if queries.rows is not None:
            hidden = torch.index_select(hidden, 0, queries.rows)
        delta = self.attention(normed, step.positions, slots, queries)
        delta = self._finish_block(delta, self.post_attention_norm)
        if self.parallel:
            if queries.rows is not None:
                normed = torch.index_select(as_tensor(normed), 0, queries.rows)
            hidden = add(self._kernels, hidden, delta)
        else:
            normed, hidden = self.feed_forward_norm(hidden, delta)
        delta = self.run_feed_forward(normed, hidden, step, queries, slots)
        delta = self._finish_block(delta, self.post_feed_forward_norm)
        if self._token_input is not None:
            assert step.token_inputs is not None
            own_inputs = step.token_inputs[:, self._place]
            if queries.rows is not None:
                own_inputs = torch.index_select(own_inputs, 0, queries.rows)
            hidden = add(self._kernels, hidden, delta)
            delta = self._token_input(hidden, own_inputs)
        if self._output_factor is None:
            return hidden, delta
        return scale_rows(self._kernels, add(self._kernels, hidden, delta), self._output_factor), None

    def _finish_block(self, delta: Tensor, norm: NormLayer | None) -> Tensor:
        """What is added to the residual stream, for the output of a block."""
        if norm is not None:
            delta = norm(delta)
        return delta if self._residual_factor is None else scale_rows(self._kernels, delta, self._residual_factor)

    def share_cache(self, layers: Sequence[DecoderLayer], first_layer: int) -> None:
        """Let this layer read the pages of the layer whose keys and values it shares, if it stores none.

        `layers` are those of the stage. The first of them has the number `first_layer` in the model.
        """
        if self._storing != self._index:
            source = layers[self._storing - first_layer].attention
            assert isinstance(self.attention, AttentionLayer)
            assert isinstance(source, AttentionLayer)
            self.attention.pages = source.pages

    def queries_and_slots(self, step: StepInput) -> tuple[Queries, Tensor]:
        """The tokens that attend in this layer, and the slots for the step's keys and values."""
        return step.queries(self._kv_group, self.selects), step.kv_groups[self._kv_group].slots

    def run_feed_forward(
        self, normed: LinearInput, hidden: Tensor, step: StepInput, queries: Queries, slots: Tensor
    ) -> Tensor:
        """The feed-forward block's output for the remaining rows; `normed` is the norm of `hidden`."""
        if isinstance(self.feed_forward, DenseFeedForward):
            return self.feed_forward(normed)
        rows = self._rows_of_replicas(step.replica_tokens, step.replica_samples)
        return self.feed_forward(normed, hidden, rows, slots if queries.rows is None else None)

    def run_empty_step(
        self, replica_tokens: tuple[int, ...], replica_samples: tuple[int, ...], nothing: Tensor
    ) -> None:
        """Run the exchanges of a step in which this replica has no token; `nothing` is empty hidden states [0, H]."""
        if isinstance(self.feed_forward, MoEFeedForward):
            self.feed_forward(nothing, nothing, self._rows_of_replicas(replica_tokens, replica_samples))

    def _rows_of_replicas(self, tokens: tuple[int, ...], samples: tuple[int, ...]) -> tuple[int, ...]:
        """How many rows each replica in lockstep has in this layer's feed-forward block."""
        return samples if self._sampled_only else tokens


def _input_norm(loader: LayerLoader, name: str, norm: Norm | None, form: InputForm) -> InputNorm | NoNorm:
    return NoNorm(loader) if norm is None else InputNorm(loader, name, norm, input_form=form)


def _attention(
    loader: LayerLoader, name: str, spec: Attention, tables: RotaryTables
) -> AttentionLayer | LatentAttentionLayer:
    if isinstance(spec, MLA):
        return LatentAttentionLayer(loader, name, spec, tables)
    assert isinstance(spec, GQA), "only the planner knows other kinds"
    return AttentionLayer(loader, name, spec, tables)


class FusedLayers(Protocol):
    """The layers of a stage with fewer kernel launches, for steps that gain from it; the bits are the same."""

    def fits_step(self, step: StepInput) -> bool:
        """Whether a step should use the fused layers."""

    def __call__(self, step: StepInput, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `DecoderStage.run_layers`."""


class DecoderStage:
    """The layers [layers.start, layers.stop) of a model; the first stage embeds tokens, the last computes logits.

    If prompts are embedded, the last stage has no lm_head and returns the final hidden states.
    """

    def __init__(self, loader: LayerLoader, layers: Span) -> None:
        stage = loader.stage
        spec = stage.spec
        tables = RotaryTables(stage)
        self._kernels = stage.kernels
        self._nothing = torch.empty(0, spec.hidden_size, dtype=stage.dtype, device=stage.device)
        last = layers.stop == len(spec.layers)
        self.lm_head = LMHead(loader) if last and not stage.embeds else None
        tied = self.lm_head.look_up_rows if self.lm_head is not None and spec.tied_embeddings else None
        self._embedding = TokenEmbedding(loader, tied) if embeds_tokens(spec, layers) else None
        self._is_first = layers.start == 0
        self._token_inputs: TokenInputs | None = None
        if spec.token_input is not None:
            assert self._embedding is not None
            self._token_inputs = TokenInputs(loader, layers, spec, self._embedding)
        self.layers = [DecoderLayer(loader, layers.start + place, tables, place) for place in range(layers.size)]
        self._finite_checker = stage.finite_checker
        self._first_layer, self._last_storing = layers.start, last_storing_layer(spec)
        self._final_norm: InputNorm | None = None
        if last:
            input_form: InputForm = "tensor" if self.lm_head is None else self.lm_head.input_form
            self._final_norm = InputNorm(loader, "final_norm", spec.final_norm, input_form=input_form)
        self.embeds_prompts = last and stage.embeds
        self.fused: FusedLayers | None = None
        """Runs the layers of the steps that it fits; None: no step."""

    def embed(self, step: StepInput) -> Tensor:
        """The embedded tokens, hidden states [T, H]; only the first stage has them."""
        assert self._embedding is not None
        return self._embedding(step.token_ids, step.positions)

    def add_inputs(self, step: StepInput, hidden: Tensor) -> StepInput:
        """The step with all that the layers read beside `hidden`, the stage's input [T, H]."""
        if self._token_inputs is None:
            return step
        return self._token_inputs.add_to(step, hidden if self._is_first else None)

    def keep_memory(self, max_seqs: int) -> None:
        """Allocate the memory that decode steps of up to `max_seqs` sequences share."""
        if self._token_inputs is not None:
            self._token_inputs.keep_memory(max_seqs)

    def forward(self, step: StepInput, hidden: Tensor) -> Tensor:
        """Run the layers on hidden states [T, H]. Returns the input of the next stage, [T, H]. The last stage returns
        this rank's fp32 logits of the sampled rows, [R, local vocab], or, for a greedy step, only the best logit of
        each row (see LMHead.find_best). If prompts are embedded, it returns the final hidden states [R, H].
        """
        hidden, delta = self._run_stage(step, hidden)
        if self._final_norm is None:
            return hidden if delta is None else add(self._kernels, hidden, delta)
        normed, _ = self._final_norm(hidden, delta)
        if self.lm_head is None:
            return as_tensor(normed)
        if step.greedy:
            return self.lm_head.find_best(normed, step.allowed)
        logits = self.lm_head(normed)
        if self._finite_checker is not None:
            self._finite_checker.check_tensor("the logits", logits, _sampled_rows(step))
        return logits

    def forward_scored(
        self, step: StepInput, hidden: Tensor, rows_each: int, read_logits: Callable[[slice, Tensor], None]
    ) -> Tensor:
        """As `forward`, on the last stage, for a step with scored tokens.

        `read_logits` gets this rank's logits of `step.scored`, for at most `rows_each` of its rows at a time. The
        logits of the sampled rows are returned.
        """
        assert self._final_norm is not None
        assert self.lm_head is not None
        assert step.scored is not None
        assert step.sampled is not None
        hidden, delta = self._run_stage(step, hidden)
        tokens, scored = step.sampled.rows, step.scored
        for first in range(0, len(scored.rows), rows_each):
            part = slice(first, first + rows_each)
            read_logits(part, self._logits_of(hidden, delta, scored.rows[part], tokens))
        if len(scored.sampled) == 0:
            return torch.empty(0, 0, device=hidden.device)
        return self._logits_of(hidden, delta, scored.sampled, tokens)

    def _logits_of(self, hidden: Tensor, delta: Tensor | None, rows: Tensor, tokens: Tensor) -> Tensor:
        """This rank's logits of some rows of the last layer's output; `tokens`: the step's token of each row."""
        assert self._final_norm is not None
        assert self.lm_head is not None
        own_delta = None if delta is None else torch.index_select(delta, 0, rows)
        normed, _ = self._final_norm(torch.index_select(hidden, 0, rows), own_delta)
        logits = self.lm_head(normed)
        if self._finite_checker is not None:
            self._finite_checker.check_tensor("the logits", logits, tokens[rows])
        return logits

    def _run_stage(self, step: StepInput, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `run_layers`, fused if that is faster."""
        fused = self.fused
        return fused(step, hidden) if fused and fused.fits_step(step) else self.run_layers(step, hidden)

    def run_layers(self, step: StepInput, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream [T, H] after the layers, and the tensor that the next norm adds to it; None: it adds
        nothing."""
        delta: Tensor | None = None
        sampled_rows, finite_checker = _sampled_rows(step), self._finite_checker
        if finite_checker is not None:
            finite_checker.begin_step(len(hidden))
            finite_checker.check_tensor("the embedding" if self._embedding else "what the previous stage sent", hidden)
        for index, layer in enumerate(self.layers, self._first_layer):
            hidden, delta = layer(hidden, delta, step)
            if finite_checker is not None:
                finite_checker.check_tensor(
                    f"layer {index}",
                    hidden if delta is None else delta,
                    sampled_rows if index >= self._last_storing else None,
                )
            if layer.selects and layer is not self.layers[-1]:
                step = step.sampled_only()
        return hidden, delta

    def run_empty_step(self, replica_tokens: tuple[int, ...], replica_samples: tuple[int, ...]) -> None:
        """Run the exchanges of a step in which this replica has no token: its ranks hold experts that other replicas
        need."""
        for layer in self.layers:
            layer.run_empty_step(replica_tokens, replica_samples, self._nothing)


def _sampled_rows(step: StepInput) -> Tensor | None:
    return None if step.sampled is None else step.sampled.rows
