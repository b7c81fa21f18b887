"""From a DecoderSpec to the modules of one pipeline stage."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.models.partition import Span, kv_groups
from shardline.models.spec import MLA, Attention, MoE
from shardline.runtime.layers.attention import AttentionLayer, RotaryTables
from shardline.runtime.layers.context import LayerContext
from shardline.runtime.layers.embedding import TokenEmbedding
from shardline.runtime.layers.feed_forward import DenseFeedForward
from shardline.runtime.layers.lm_head import LMHead
from shardline.runtime.layers.mla import LatentAttentionLayer
from shardline.runtime.layers.moe import MoEFeedForward
from shardline.runtime.layers.norm import InputNorm, NormLayer
from shardline.runtime.ops.add import add
from shardline.runtime.ops.few_rows import AddedRows
from shardline.runtime.ops.linear_input import as_tensor
from shardline.runtime.step import StepInput


class DecoderLayer:
    """One layer. The residual stream travels as (hidden, delta): `delta` is added by the next norm that reads it, or
    has been by the product that made it, and then is the stream."""

    def __init__(self, context: LayerContext, index: int, tables: RotaryTables) -> None:
        name, spec = f"layers.{index}", context.spec.layers[index]
        self._kv_group = next(g for g, group in enumerate(kv_groups(context.spec)) if index in group.layers)
        self._last = index + 1 == len(context.spec.layers)
        self.attention = _attention(context, f"{name}.attention", spec.attention, tables)
        self._attention_norm = InputNorm(
            context, f"{name}.attention_norm", spec.attention_norm, takes=self.attention.takes
        )
        self.feed_forward: DenseFeedForward | MoEFeedForward
        if isinstance(spec.feed_forward, MoE):
            self.feed_forward = MoEFeedForward(context, index, spec.feed_forward)
        else:
            self.feed_forward = DenseFeedForward(context, f"{name}.feed_forward", spec.feed_forward)
        self._feed_forward_norm = InputNorm(
            context, f"{name}.feed_forward_norm", spec.feed_forward_norm, takes=self.feed_forward.takes
        )

        def optional(part: str, norm: object) -> NormLayer | None:
            return NormLayer(context, f"{name}.{part}", getattr(spec, part)) if norm else None

        self._post_attention = optional("post_attention_norm", spec.post_attention_norm)
        self._post_feed_forward = optional("post_feed_forward_norm", spec.post_feed_forward_norm)

    def __call__(
        self, hidden: Tensor, delta: Tensor | AddedRows | None, step: StepInput
    ) -> tuple[Tensor, Tensor | AddedRows]:
        """hidden, delta [T, H] -> the same after this layer; the model's last one returns the sampled rows only."""
        normed, hidden = self._attention_norm(hidden, delta)
        queries, slots = step.queries(self._kv_group, self._last), step.kv_groups[self._kv_group].slots
        if queries.rows is not None:
            hidden = torch.index_select(hidden, 0, queries.rows)
        residual = hidden if self._post_attention is None else None
        delta = self.attention(normed, step.positions, slots, queries, residual)
        if self._post_attention is not None:
            delta = self._post_attention(as_tensor(delta))
        normed, hidden = self._feed_forward_norm(hidden, delta)
        if isinstance(self.feed_forward, MoEFeedForward):
            count = step.replica_samples if self._last else step.replica_tokens
            delta = self.feed_forward(normed, count, slots if queries.rows is None else None)
        else:
            delta = self.feed_forward(normed, hidden if self._post_feed_forward is None else None)
        if self._post_feed_forward is not None:
            delta = self._post_feed_forward(as_tensor(delta))
        return hidden, delta

    def join(self, replica_tokens: tuple[int, ...], replica_samples: tuple[int, ...], nothing: Tensor) -> None:
        """Take part in a step in which this replica has no token, `nothing` [0, H]."""
        if isinstance(self.feed_forward, MoEFeedForward):
            self.feed_forward(nothing, replica_samples if self._last else replica_tokens)


def _attention(
    context: LayerContext, name: str, spec: Attention, tables: RotaryTables
) -> AttentionLayer | LatentAttentionLayer:
    if isinstance(spec, MLA):
        return LatentAttentionLayer(context, name, spec, tables)
    return AttentionLayer(context, name, spec, tables)


class DecoderStage:
    """The layers [layers.start, layers.stop) of a model; the first stage embeds, the last computes logits."""

    def __init__(self, context: LayerContext, layers: Span) -> None:
        spec = context.spec
        tables = RotaryTables(context.max_model_len, context.device)
        self._nothing = torch.empty(0, spec.hidden_size, dtype=context.dtype, device=context.device)
        first, last = layers.start == 0, layers.stop == len(spec.layers)
        self.lm_head = LMHead(context) if last else None
        held = self.lm_head.rows if self.lm_head is not None and spec.tied_embeddings else None
        self._embedding = TokenEmbedding(context, held) if first else None
        self.layers = [DecoderLayer(context, index, tables) for index in range(layers.start, layers.stop)]
        self._watch = context.watch
        self._first_layer, self._last_layer = layers.start, len(spec.layers) - 1
        self._final_norm: InputNorm | None = None
        if self.lm_head is not None:
            self._final_norm = InputNorm(context, "final_norm", spec.final_norm, takes=self.lm_head.takes)

    def embed(self, step: StepInput) -> Tensor:
        """What the first stage begins with: hidden states [T, H]."""
        assert self._embedding is not None
        return self._embedding(step.token_ids, step.positions)

    def forward(self, step: StepInput, hidden: Tensor) -> Tensor:
        """Hidden states [T, H] through the layers: the next stage's, or from the last this rank's fp32 logits of the
        sampled rows [R, local vocab], if the step is greedy only the best of each, see LMHead.best.
        """
        delta: Tensor | AddedRows | None = None
        watch = self._watch
        if watch is not None:
            watch.begin(len(hidden))
            watch.look("the embedding" if self._embedding else "what the previous stage sent", hidden)
        rows = step.sampled.rows if step.sampled is not None else None
        for index, layer in enumerate(self.layers, self._first_layer):
            hidden, delta = layer(hidden, delta, step)
            if watch is not None:
                seen = delta.rows if isinstance(delta, AddedRows) else delta
                watch.look(f"layer {index}", seen, rows if index == self._last_layer else None)
        assert delta is not None
        if self._final_norm is None or self.lm_head is None:
            return delta.rows if isinstance(delta, AddedRows) else add(hidden, delta)
        normed, _ = self._final_norm(hidden, delta)
        if step.greedy:
            return self.lm_head.best(normed)
        logits = self.lm_head(normed)
        if watch is not None:
            watch.look("the logits", logits, rows)
        return logits

    def join(self, replica_tokens: tuple[int, ...], replica_samples: tuple[int, ...]) -> None:
        """Take part in a step in which this replica has no token: its ranks hold experts that others need."""
        for layer in self.layers:
            layer.join(replica_tokens, replica_samples, self._nothing)
