"""From a DecoderSpec to the modules of one pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from shardline.kernels.tensors import InputForm, as_tensor
from shardline.models.attention import GQA, Attention
from shardline.models.feed_forward import Dense, FeedForward, MoE
from shardline.models.kv_groups import last_storing_layer, storing_layer
from shardline.models.mla import MLA
from shardline.models.parameters import embeds_tokens
from shardline.models.partition import Span
from shardline.models.parts import Norm
from shardline.runtime.layers.adapted_vocabulary import make_embedding, make_lm_head
from shardline.runtime.layers.attention import AttentionLayer
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.context_parallel import SharedAttentionLayer, SharedLatentLayer
from shardline.runtime.layers.feed_forward import DenseFeedForward
from shardline.runtime.layers.kept_output import KeptOutput
from shardline.runtime.layers.mla import LatentAttentionLayer
from shardline.runtime.layers.moe import MoEFeedForward
from shardline.runtime.layers.norm import InputNorm, NoNorm, NormLayer
from shardline.runtime.layers.token_input import TokenInputBlock, TokenInputs
from shardline.runtime.layers.vocabulary import Classifier
from shardline.runtime.ops.add import add
from shardline.runtime.ops.attention.rope import RotaryTables
from shardline.runtime.ops.scale import scale_rows
from shardline.runtime.step import Rows, StepInput, empty_rows

_ATTENTION: Mapping[type[Attention], Callable[..., AttentionLayer | LatentAttentionLayer]] = {
    GQA: AttentionLayer,
    MLA: LatentAttentionLayer,
}
_SHARED_ATTENTION: Mapping[type[Attention], Callable[..., AttentionLayer | LatentAttentionLayer]] = {
    GQA: SharedAttentionLayer,
    MLA: SharedLatentLayer,
}
"""Those whose keys ranks share."""
_FEED_FORWARD: Mapping[type[FeedForward], Callable[..., DenseFeedForward | MoEFeedForward]] = {
    Dense: DenseFeedForward,
    MoE: MoEFeedForward,
}
"""The layers that compute the kinds of blocks. Only the planner knows other kinds."""


class DecoderLayer:
    """One layer. The residual stream travels as (hidden, delta): the next norm that reads it adds `delta`."""

    def __init__(self, loader: LayerLoader, index: int, tables: RotaryTables, place: int) -> None:
        """`index`: number of the layer in the model; `place`: its number in the stage."""
        stage = loader.stage
        name, spec = f"layers.{index}", stage.spec.layers[index]
        self.storing = storing_layer(stage.spec, index)
        """The layer of the model whose pages this layer reads: itself, or an earlier one."""
        kv_group = next(g for g, group in enumerate(stage.kv_groups) if self.storing in group.layers)
        self._kernels = stage.kernels
        self._narrows = index == max((last_storing_layer(stage.spec), *stage.kept_layers))
        kinds = _SHARED_ATTENTION if stage.context_group.size > 1 else _ATTENTION
        attention, feed_forward = kinds[type(spec.attention)], _FEED_FORWARD[type(spec.feed_forward)]
        self.attention = attention(loader, f"{name}.attention", spec.attention, tables, kv_group)
        self.feed_forward = feed_forward(loader, f"{name}.feed_forward", spec.feed_forward)
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
        self._place = place
        self._output_factor = loader.load(f"{name}.output_scale.bias") if spec.output_scale else None
        self._residual_factor: Tensor | None = None
        if spec.residual_scale != 1.0:
            self._residual_factor = torch.tensor([spec.residual_scale], device=stage.device)

        def optional(part: str, norm: Norm | None) -> NormLayer | None:
            return NormLayer(loader, f"{name}.{part}", norm) if norm else None

        self.post_attention_norm = optional("post_attention_norm", spec.post_attention_norm)
        self.post_feed_forward_norm = optional("post_feed_forward_norm", spec.post_feed_forward_norm)

    def __call__(self, hidden: Tensor, delta: Tensor | None, rows: Rows) -> tuple[Tensor, Tensor | None, Rows]:
        """hidden, delta [T, H] of `rows` -> the same after this layer, and the rows that are left."""
        left = self.rows_left(rows)
        normed, hidden = self.attention_norm(hidden, delta)
        if left is not rows:
            hidden = left.take(hidden)
        delta = self.attention(normed, rows, left)
        delta = self._finish_block(delta, self.post_attention_norm)
        if self.parallel:
            if left is not rows:
                normed = left.take(as_tensor(normed))
            hidden = add(self._kernels, hidden, delta)
        else:
            normed, hidden = self.feed_forward_norm(hidden, delta)
        delta = self.feed_forward(normed, left, hidden)
        delta = self._finish_block(delta, self.post_feed_forward_norm)
        if self._token_input is not None:
            assert left.token_inputs is not None
            hidden = add(self._kernels, hidden, delta)
            delta = self._token_input(hidden, left.token_inputs[:, self._place], left)
        if self._output_factor is None:
            return hidden, delta, left
        return scale_rows(self._kernels, add(self._kernels, hidden, delta), self._output_factor), None, left

    def _finish_block(self, delta: Tensor, norm: NormLayer | None) -> Tensor:
        """What is added to the residual stream, for the output of a block."""
        if norm is not None:
            delta = norm(delta)
        return delta if self._residual_factor is None else scale_rows(self._kernels, delta, self._residual_factor)

    def rows_left(self, rows: Rows) -> Rows:
        """The rows that go on once this layer has stored the keys and values of `rows`."""
        return rows.narrow() if self._narrows else rows

    def run_empty_step(self, nothing: Tensor, rows: Rows) -> Rows:
        """Run the exchanges of a step in which this replica has no token; `nothing` is empty hidden states [0, H].
        Returns the rows that are left."""
        left = self.rows_left(rows)
        if self.feed_forward.meets_replicas:
            self.feed_forward(nothing, left, nothing)
        return left


def _input_norm(loader: LayerLoader, name: str, norm: Norm | None, form: InputForm) -> InputNorm | NoNorm:
    return NoNorm(loader) if norm is None else InputNorm(loader, name, norm, input_form=form)


class DecoderStage:
    """The layers [layers.start, layers.stop) of a model; the first stage embeds tokens, the last computes logits.

    If prompts are embedded, the last stage has no lm_head and returns the final hidden states, or what the classifier
    of the model makes of them.
    """

    def __init__(self, loader: LayerLoader, layers: Span) -> None:
        stage = loader.stage
        spec = stage.spec
        tables = RotaryTables(stage.max_model_len, stage.device)
        self._kernels = stage.kernels
        self._nothing = torch.empty(0, spec.hidden_size, dtype=stage.dtype, device=stage.device)
        last = layers.stop == len(spec.layers) and spec.head_input is None
        self.lm_head = make_lm_head(loader) if last and not stage.embeds else None
        self._classifier = Classifier(loader) if last and spec.num_labels is not None else None
        tied = self.lm_head.look_up_rows if self.lm_head is not None and spec.tied_embeddings else None
        self.embedding = make_embedding(loader, tied) if embeds_tokens(spec, layers) else None
        self.is_first = layers.start == 0
        self._token_inputs: TokenInputs | None = None
        if spec.token_input is not None:
            assert self.embedding is not None
            self._token_inputs = TokenInputs(loader, layers, spec, self.embedding)
        self.layers: list[DecoderLayer] = []
        self.stream = stage.stream
        """Reads the weights of layers that do not stay in memory."""
        self.reads_weights = self.stream is not None or stage.expert_stream is not None
        for place in range(layers.size):
            with nullcontext() if self.stream is None else self.stream.loading(layers.start + place):
                self.layers.append(DecoderLayer(loader, layers.start + place, tables, place))
        self.finite_checker = stage.finite_checker
        self._first_layer = layers.start
        self.final_norm: InputNorm | None = None
        if last:
            input_form: InputForm = "tensor" if self.lm_head is None else self.lm_head.input_form
            self.final_norm = InputNorm(loader, "final_norm", spec.final_norm, input_form=input_form)
        self.is_last = last
        end = layers.stop + last  # what comes out of the last layer counts as one more
        self.kept = KeptOutput(stage, layers.start, end) if min(stage.kept_layers, default=end) < end else None
        """What a head reads of this stage and those before it; None: nothing."""
        self.embeds_prompts = last and stage.embeds
        self.adapted = tuple(loader.adapted)
        """The linears that adapters can change; none if the deployment takes no adapters."""
        self.scaling_slots, self.expert_slots = loader.scaling_slots, loader.expert_slots

    def embed(self, step: StepInput) -> Tensor:
        """The embedded tokens, hidden states [T, H]; only the first stage has them."""
        assert self.embedding is not None
        return self.embedding(step.token_ids, step.rows, step.given)

    def add_inputs(self, step: StepInput, hidden: Tensor) -> StepInput:
        """The step with all that the layers read beside `hidden`, the stage's input [T, H]."""
        if self._token_inputs is None:
            return step
        return self._token_inputs.add_to(step, hidden if self.is_first else None)

    def keep_memory(self, max_seqs: int) -> None:
        """Allocate the memory that decode steps of up to `max_seqs` sequences share."""
        if self._token_inputs is not None:
            self._token_inputs.keep_memory(max_seqs)
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
            return hidden if delta is None else add(self._kernels, hidden, delta)
        normed, _ = self.final_norm(hidden, delta)
        if self._classifier is not None:
            return self._classifier(as_tensor(normed))
        if self.lm_head is None:
            return as_tensor(normed)
        if step.greedy:
            return self.lm_head.find_best(normed, step.allowed)
        logits = self.lm_head(normed, step.rows.narrow())
        if self.finite_checker is not None:
            self.finite_checker.check_tensor("the logits", logits, step.rows.narrow().places)
        return logits

    def run_stage(self, step: StepInput, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `run_layers`, for the rows that go on."""
        output = self.run_layers(step, hidden)
        return output if self.kept is None else self.kept.keep_output(step, *output)

    def run_layers(self, step: StepInput, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream [T, H] after the layers, and the tensor that the next norm adds to it; None: it adds
        nothing."""
        delta: Tensor | None = None
        rows, finite_checker = step.rows, self.finite_checker
        if finite_checker is not None:
            finite_checker.begin_step(len(hidden))
            finite_checker.check_tensor("the embedding" if self.embedding else "what the previous stage sent", hidden)
        for index, layer in enumerate(self.layers, self._first_layer):
            if self.stream is not None:
                self.stream.acquire(index)
            if self.kept is not None:
                self.kept.keep_input(index, step, hidden, delta)
            hidden, delta, rows = layer(hidden, delta, rows)
            if self.stream is not None:
                self.stream.release(index)
            if finite_checker is not None:
                finite_checker.check_tensor(f"layer {index}", hidden if delta is None else delta, rows.places)
        return hidden, delta

    def run_empty_step(self, replica_tokens: tuple[int, ...], replica_samples: tuple[int, ...]) -> None:
        """Run the exchanges of a step in which this replica has no token: its ranks hold experts that other replicas
        need."""
        rows = empty_rows(replica_tokens, replica_samples)
        for index, layer in enumerate(self.layers, self._first_layer):
            if self.stream is not None:
                self.stream.acquire(index)
            rows = layer.run_empty_step(self._nothing, rows)
            if self.stream is not None:
                self.stream.release(index)
