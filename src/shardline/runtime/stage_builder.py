"""From a DecoderSpec to the modules of one pipeline stage, whose weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from shardline.kernels.tensors import InputForm
from shardline.models.attention import GQA, Attention
from shardline.models.feed_forward import Dense, FeedForward, MoE
from shardline.models.kv_groups import last_storing_layer, storing_layer
from shardline.models.linear_attention import LinearAttention
from shardline.models.mamba import Mamba2
from shardline.models.mla import MLA
from shardline.models.parameters import embeds_tokens
from shardline.models.partition import Span
from shardline.models.parts import Norm
from shardline.runtime.decoder import DecoderLayer, DecoderStage
from shardline.runtime.layers.adapted_vocabulary import make_embedding, make_lm_head
from shardline.runtime.layers.attention import AttentionLayer
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.context_parallel import SharedAttentionLayer, SharedLatentLayer
from shardline.runtime.layers.feed_forward import DenseFeedForward, NoFeedForward
from shardline.runtime.layers.kept_output import KeptOutput
from shardline.runtime.layers.linear_attention import DeltaRuleLayer, MambaLayer, StateLayer
from shardline.runtime.layers.mla import LatentAttentionLayer
from shardline.runtime.layers.moe import MoEFeedForward
from shardline.runtime.layers.norm import InputNorm, NoNorm, NormLayer
from shardline.runtime.layers.sparse_mla import SparseLatentLayer
from shardline.runtime.layers.token_input import TokenInputBlock, TokenInputs
from shardline.runtime.layers.vocabulary import Classifier
from shardline.runtime.ops.attention.rope import RotaryTables

_MakeLayer = Callable[..., AttentionLayer | LatentAttentionLayer | StateLayer[Any]]
_ATTENTION: Mapping[type[Attention], _MakeLayer] = {
    GQA: AttentionLayer,
    MLA: LatentAttentionLayer,
    LinearAttention: DeltaRuleLayer,
    Mamba2: MambaLayer,
}
_SHARED_ATTENTION: Mapping[type[Attention], _MakeLayer] = {
    GQA: SharedAttentionLayer,
    MLA: SharedLatentLayer,
}
"""Those whose keys ranks share."""
_FEED_FORWARD: Mapping[type[FeedForward], Callable[..., DenseFeedForward | MoEFeedForward]] = {
    Dense: DenseFeedForward,
    MoE: MoEFeedForward,
}
"""The layers that compute the kinds of blocks. Only the planner knows other kinds."""


def build_stage(loader: LayerLoader, layers: Span) -> DecoderStage:
    """The stage of these layers of the model."""
    stage, spec = loader.stage, loader.stage.spec
    tables = RotaryTables(stage.max_model_len, stage.device)
    last = layers.stop == len(spec.layers) and spec.head_input is None
    lm_head = make_lm_head(loader) if last and not stage.embeds else None
    classifier = Classifier(loader) if last and spec.num_labels is not None else None
    tied = lm_head.look_up_rows if lm_head is not None and spec.tied_embeddings else None
    embedding = make_embedding(loader, tied) if embeds_tokens(spec, layers) else None
    token_inputs: TokenInputs | None = None
    if spec.token_input is not None:
        assert embedding is not None
        token_inputs = TokenInputs(loader, layers, spec, embedding)
    built = []
    for place in range(layers.size):
        with nullcontext() if stage.stream is None else stage.stream.loading(layers.start + place):
            built.append(_build_layer(loader, layers.start + place, tables, place))
    final_norm: InputNorm | None = None
    if last:
        input_form: InputForm = "tensor" if lm_head is None else lm_head.input_form
        final_norm = InputNorm(loader, "final_norm", spec.final_norm, input_form=input_form)
    end = layers.stop + last  # what comes out of the last layer counts as one more
    return DecoderStage(
        kernels=stage.kernels,
        first_layer=layers.start,
        is_first=layers.start == 0,
        is_last=last,
        layers=built,
        embedding=embedding,
        token_inputs=token_inputs,
        final_norm=final_norm,
        lm_head=lm_head,
        classifier=classifier,
        embeds_prompts=last and stage.embeds,
        stream=stage.stream,
        never_recorded=stage.stream is not None
        or stage.expert_stream is not None
        or any(stage.spec.layers[index].attention.num_chosen for index in range(layers.start, layers.stop)),
        kept=KeptOutput(stage, layers.start, end) if min(stage.kept_layers, default=end) < end else None,
        finite_checker=stage.finite_checker,
        nothing=torch.empty(0, spec.hidden_size, dtype=stage.dtype, device=stage.device),
    )


def _build_layer(loader: LayerLoader, index: int, tables: RotaryTables, place: int) -> DecoderLayer:
    """`index`: number of the layer in the model; `place`: its number in the stage."""
    stage = loader.stage
    name, spec = f"layers.{index}", stage.spec.layers[index]
    storing = storing_layer(stage.spec, index)
    kv_group = next((g for g, group in enumerate(stage.kv_groups) if storing in group.layers), 0)
    kinds = _SHARED_ATTENTION if stage.context_group.size > 1 else _ATTENTION
    make_attention = kinds[type(spec.attention)]
    if spec.attention.num_chosen:
        make_attention = SparseLatentLayer
    attention = make_attention(loader, f"{name}.attention", spec.attention, tables, kv_group)
    feed_forward: DenseFeedForward | MoEFeedForward | NoFeedForward = NoFeedForward()
    if spec.feed_forward.block.intermediate_size:
        feed_forward = _FEED_FORWARD[type(spec.feed_forward)](loader, f"{name}.feed_forward", spec.feed_forward)

    def input_norm(part: str, norm: Norm | None, form: InputForm) -> InputNorm | NoNorm:
        return NoNorm(loader) if norm is None else InputNorm(loader, f"{name}.{part}", norm, input_form=form)

    def optional(part: str, norm: Norm | None) -> NormLayer | None:
        return NormLayer(loader, f"{name}.{part}", norm) if norm else None

    # Rows of an input for both blocks are selected between them, so they are not quantized yet.
    form: InputForm = "tensor" if spec.parallel else attention.input_form
    scale = spec.residual_scale
    return DecoderLayer(
        kernels=stage.kernels,
        place=place,
        storing=storing,
        narrows=index == max((last_storing_layer(stage.spec), *stage.kept_layers)),
        attention=attention,
        feed_forward=feed_forward,
        parallel=spec.parallel,
        attention_norm=input_norm("attention_norm", spec.attention_norm, form),
        feed_forward_norm=input_norm("feed_forward_norm", spec.feed_forward_norm, feed_forward.input_form),
        token_input=TokenInputBlock(loader, f"{name}.token_input", spec.token_input) if spec.token_input else None,
        output_factor=loader.load(f"{name}.output_scale.bias") if spec.output_scale else None,
        residual_factor=None if scale == 1.0 else torch.tensor([scale], device=stage.device),
        post_attention_norm=optional("post_attention_norm", spec.post_attention_norm),
        post_feed_forward_norm=optional("post_feed_forward_norm", spec.post_feed_forward_norm),
    )
