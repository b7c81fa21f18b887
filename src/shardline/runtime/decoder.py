"""From a DecoderSpec to the modules of one pipeline stage."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline.models.partition import Span, kv_groups
from shardline.models.spec import Layer, MoE
from shardline.runtime.layers.attention import AttentionLayer, RotaryTables
from shardline.runtime.layers.context import LayerContext
from shardline.runtime.layers.embedding import TokenEmbedding
from shardline.runtime.layers.feed_forward import DenseFeedForward
from shardline.runtime.layers.lm_head import LMHead
from shardline.runtime.layers.moe import MoEFeedForward
from shardline.runtime.layers.norm import NormLayer
from shardline.runtime.step import KVGroupInput, StepInput


class DecoderLayer:
    """One layer. The residual stream travels as (hidden, delta): `delta` is added by the next norm that reads it."""

    def __init__(self, context: LayerContext, index: int, spec: Layer, tables: RotaryTables) -> None:
        name = f"layers.{index}"
        self._attention_norm = NormLayer(context, f"{name}.attention_norm", spec.attention_norm)
        self.attention = AttentionLayer(context, f"{name}.attention", spec.attention, tables)
        self._feed_forward_norm = NormLayer(context, f"{name}.feed_forward_norm", spec.feed_forward_norm)
        self.feed_forward: DenseFeedForward | MoEFeedForward
        if isinstance(spec.feed_forward, MoE):
            self.feed_forward = MoEFeedForward(context, index, spec.feed_forward)
        else:
            self.feed_forward = DenseFeedForward(context, f"{name}.feed_forward", spec.feed_forward)

        def optional(part: str, norm: object) -> NormLayer | None:
            return NormLayer(context, f"{name}.{part}", getattr(spec, part)) if norm else None

        self._post_attention = optional("post_attention_norm", spec.post_attention_norm)
        self._post_feed_forward = optional("post_feed_forward_norm", spec.post_feed_forward_norm)

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, step: StepInput, kv: KVGroupInput
    ) -> tuple[Tensor, Tensor]:
        """hidden, delta [T, H] -> the same after this layer."""
        if delta is None:
            normed = self._attention_norm(hidden)
        else:
            normed, hidden = self._attention_norm.add(delta, hidden)
        delta = self.attention(normed, step, kv)
        if self._post_attention is not None:
            delta = self._post_attention(delta)
        normed, hidden = self._feed_forward_norm.add(delta, hidden)
        if isinstance(self.feed_forward, MoEFeedForward):
            delta = self.feed_forward(normed, step.replica_tokens)
        else:
            delta = self.feed_forward(normed)
        if self._post_feed_forward is not None:
            delta = self._post_feed_forward(delta)
        return hidden, delta


class DecoderStage:
    """The layers [layers.start, layers.stop) of a model; the first stage embeds, the last computes logits."""

    def __init__(self, context: LayerContext, layers: Span) -> None:
        spec = context.spec
        tables = RotaryTables(context.max_model_len)
        self._group_of = [
            next(g for g, group in enumerate(kv_groups(spec)) if index in group.layers)
            for index in range(layers.start, layers.stop)
        ]
        self._hidden_size, self._dtype = spec.hidden_size, context.dtype
        first, last = layers.start == 0, layers.stop == len(spec.layers)
        self.lm_head = LMHead(context) if last else None
        held = self.lm_head.rows if self.lm_head is not None and spec.tied_embeddings else None
        self._embedding = TokenEmbedding(context, held) if first else None
        self.layers = [
            DecoderLayer(context, index, spec.layers[index], tables) for index in range(layers.start, layers.stop)
        ]
        self._final_norm = NormLayer(context, "final_norm", spec.final_norm) if last else None

    def forward(self, step: StepInput, hidden: Tensor | None) -> Tensor:
        """Hidden states [T, H] for the next stage, or, from the last one, this rank's fp32 logits of the sampled
        rows [R, local vocab]. `hidden` comes from the previous stage; the first has none.
        """
        if self._embedding is not None:
            hidden = self._embedding(step.token_ids, step.positions)
        assert hidden is not None
        delta: Tensor | None = None
        for layer, group in zip(self.layers, self._group_of, strict=True):
            hidden, delta = layer(hidden, delta, step, step.kv_groups[group])
        assert delta is not None
        if self._final_norm is None or self.lm_head is None:
            return hidden + delta
        # Norms and logits are needed of the sampled rows only.
        rows = step.sample_rows
        normed, _ = self._final_norm.add(torch.index_select(delta, 0, rows), torch.index_select(hidden, 0, rows))
        return self.lm_head(normed)

    def join(self, replica_tokens: tuple[int, ...]) -> None:
        """Take part in a step in which this replica has no token: its ranks hold experts that others need."""
        nothing = torch.empty(0, self._hidden_size, dtype=self._dtype)
        for layer in self.layers:
            if isinstance(layer.feed_forward, MoEFeedForward):
                layer.feed_forward(nothing, replica_tokens)
