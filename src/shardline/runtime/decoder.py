"""The modules of one pipeline stage, and how a step runs through them; `stage_builder` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardline.kernels.contract import Kernels
from shardline.kernels.tensors import as_tensor
from shardline.runtime.layers.attention import AttentionLayer
from shardline.runtime.layers.context import TensorChecker, WeightStream
from shardline.runtime.layers.feed_forward import DenseFeedForward, NoFeedForward
from shardline.runtime.layers.kept_output import KeptOutput
from shardline.runtime.layers.linear_attention import StateLayer
from shardline.runtime.layers.mla import LatentAttentionLayer
from shardline.runtime.layers.moe import MoEFeedForward
from shardline.runtime.layers.norm import InputNorm, NoNorm, NormLayer
from shardline.runtime.layers.token_input import TokenInputBlock, TokenInputs
from shardline.runtime.layers.vocabulary import Classifier, LMHead, TokenEmbedding
from shardline.runtime.ops.add import add
from shardline.runtime.ops.scale import scale_rows
from shardline.runtime.step import Rows, StepInput


@dataclass(eq=False)
class DecoderLayer:
    """One layer. The residual stream travels as (hidden, delta): the next norm that reads it adds `delta`."""

    kernels: Kernels
    place: int
    """Its number in the stage."""
    storing: int
    """The layer of the model whose pages this layer reads: itself, or an earlier one."""
    narrows: bool
    """Whether it stores the last keys and values that are read, so that only some rows go on."""
    attention: AttentionLayer | LatentAttentionLayer | StateLayer[Any]
    feed_forward: DenseFeedForward | MoEFeedForward | NoFeedForward
    parallel: bool
    """Whether both blocks read the same input."""
    attention_norm: InputNorm | NoNorm
    feed_forward_norm: InputNorm | NoNorm
    post_attention_norm: NormLayer | None
    post_feed_forward_norm: NormLayer | None
    token_input: TokenInputBlock | None
    output_factor: Tensor | None
    residual_factor: Tensor | None

    def __call__(self, hidden: Tensor, delta: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor | None, Rows]:
        """hidden, delta [T, H] of `rows` -> the same after this layer, and the rows that are left."""
        left = self.rows_left(rows)
        normed, hidden = self.attention_norm(hidden, delta)
        if left is not rows:
            hidden = left.take(hidden)
        delta = self.attention(normed, rows, left)
        delta = self._finish_block(delta, self.post_attention_norm)
        if isinstance(self.feed_forward, NoFeedForward):
            return hidden, delta, left
        if self.parallel:
            if left is not rows:
                normed = left.take(as_tensor(normed))
            hidden = add(self.kernels, hidden, delta)
        else:
            normed, hidden = self.feed_forward_norm(hidden, delta)
        delta = self.feed_forward(normed, left, hidden)
        delta = self._finish_block(delta, self.post_feed_forward_norm)
        if self.token_input is not None:
            assert left.token_inputs is not None
            hidden = add(self.kernels, hidden, delta)
            delta = self.token_input(hidden, left.token_inputs[:, self.place], left)
        if self.output_factor is None:
            return hidden, delta, left
        return scale_rows(self.kernels, add(self.kernels, hidden, delta), self.output_factor), None, left

    def _finish_block(self, delta: Tensor, norm: NormLayer | None) -> Tensor:
        """What is added to the residual stream, for the output of a block."""
        if norm is not None:
            delta = norm(delta)
        return delta if self.residual_factor is None else scale_rows(self.kernels, delta, self.residual_factor)

    def rows_left(self, rows: Rows) -> Rows:
        """The rows that go on once this layer has stored the keys and values of `rows`."""
        return rows.narrow() if self.narrows else rows


@dataclass(eq=False)
class DecoderStage:
    """The layers [layers.start, layers.stop) of a model; the first stage embeds tokens, the last computes logits.

    If prompts are embedded, the last stage has no lm_head and returns the final hidden states, or what the classifier
    of the model makes of them.
    """

    kernels: Kernels
    first_layer: int
    """The number of its first layer in the model."""
    is_first: bool
    is_last: bool
    layers: list[DecoderLayer]
    embedding: TokenEmbedding | None
    token_inputs: TokenInputs | None
    final_norm: InputNorm | None
    lm_head: LMHead | None
    classifier: Classifier | None
    embeds_prompts: bool
    stream: WeightStream | None
    """Reads the weights of layers that do not stay in memory."""
    never_recorded: bool
    """Whether steps of one shape may run other kernels, or wait for weights."""
    kept: KeptOutput | None
    """What a head reads of this stage and those before it; None: nothing."""
    finite_checker: TensorChecker | None
    nothing: Tensor
    """Hidden states of no token, [0, H]."""

    def embed(self, step: StepInput) -> Tensor:
        """The embedded tokens, hidden states [T, H]; only the first stage has them."""
        assert self.embedding is not None
        return self.embedding(step.token_ids, step.rows, step.given)

    def add_inputs(self, step: StepInput, hidden: Tensor) -> StepInput:
        """The step with all that the layers read beside `hidden`, the stage's input [T, H]."""
        if self.token_inputs is None:
            return step
        return self.token_inputs.add_to(step, hidden if self.is_first else None)

    def keep_memory(self, max_seqs: int) -> None:
        """Allocate the memory that decode steps of up to `max_seqs` sequences share, and for the states of as many."""
        for layer in self.layers:
            if isinstance(layer.attention, StateLayer):
                layer.attention.keep_states(max_seqs)
        if self.token_inputs is not None:
            self.token_inputs.keep_memory(max_seqs)
        if self.kept is not None:
            self.kept.keep_memory(max_seqs)

    def forward(self, step: StepInput, hidden: Tensor) -> Tensor:
        """Run the layers on hidden states [T, H]. Returns the input of the next stage, [T, H]. The last stage returns
        this rank's fp32 logits of the sampled rows, [R, local vocab], or, for a greedy step, only the best logit of
        each row (see LMHead.find_best). If prompts are embedded, it returns the final hidden states [R, H], or the
        logits of a classifier [R, labels].
        """
        hidden, delta = self.run_stage(step, hidden)
        if self.final_norm is None:
            return hidden if delta is None else add(self.kernels, hidden, delta)
        normed, _ = self.final_norm(hidden, delta)
        if self.classifier is not None:
            return self.classifier(as_tensor(normed))
        if self.lm_head is None:
            return as_tensor(normed)
        if step.greedy:
            return self.lm_head.find_best(normed, step.allowed)
        logits = self.lm_head(normed, step.rows.narrow())
        if self.finite_checker is not None:
            self.finite_checker.check_tensor("the logits", logits, step.rows.narrow().places)
        return logits

    def run_stage(self, step: StepInput, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream [T, H] after the layers, of the rows that go on, and the tensor that the next norm adds
        to it; None: it adds nothing."""
        delta: Tensor | None = None
        rows, finite_checker = step.rows, self.finite_checker
        if finite_checker is not None:
            finite_checker.begin_step(len(hidden))
            finite_checker.check_tensor("the embedding" if self.embedding else "what the previous stage sent", hidden)
        for index, layer in enumerate(self.layers, self.first_layer):
            if self.stream is not None:
                self.stream.acquire(index)
            if self.kept is not None:
                self.kept.keep_input(index, step, hidden, delta)
            hidden, delta, rows = layer(hidden, delta, rows)
            if self.stream is not None:
                self.stream.release(index)
            if finite_checker is not None:
                finite_checker.check_tensor(f"layer {index}", hidden if delta is None else delta, rows.places)
        return (hidden, delta) if self.kept is None else self.kept.keep_output(step, hidden, delta)
