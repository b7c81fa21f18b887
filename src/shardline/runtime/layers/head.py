"""What a head has before and behind its layers (see `spec.HeadInput`): the input of hidden states and tokens, and the
embedding, final norm and lm_head of the model that it belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from shardline.kernels.tensors import as_tensor
from shardline.runtime.layers.context import LayerLoader
from shardline.runtime.layers.norm import InputNorm, NormLayer
from shardline.runtime.layers.token_input import with_inputs
from shardline.runtime.layers.vocabulary import LMHead, TokenEmbedding
from shardline.runtime.ops.scale import join_columns
from shardline.runtime.step import Rows, StepInput
from shardline.weights.formats import plain


class Head:
    """The ends of a head. Ranks share the outputs of its projection."""

    def __init__(
        self, loader: LayerLoader, model: LayerLoader, lm_head: LMHead, embedding: TokenEmbedding | None
    ) -> None:
        """`loader`: of the head's weights; `model`: of those of the model, whose lm_head is here. The embedding is read
        again if it is on another stage."""
        context, spec = loader.stage, loader.stage.spec.head_input
        assert spec is not None
        self.lm_head = LMHead(loader) if spec.own_lm_head else lm_head
        self._token_ids: Sequence[int] | None = None
        if spec.names_tokens:
            offsets = loader.load("head_input.token_offsets.bias").long().cpu()
            self._token_ids = (torch.arange(len(offsets)) + offsets).tolist()
            if not 0 <= min(self._token_ids) <= max(self._token_ids) < model.stage.spec.vocab_size:
                raise ValueError("d2t of the draft model names tokens that the model does not have: it is damaged")
        self._kernels, self._group = context.kernels, context.group
        tied = lm_head.look_up_rows if model.stage.spec.tied_embeddings else None
        self._embedding = embedding or TokenEmbedding(model, tied)
        self._model_norm: InputNorm | None = None
        if not spec.sources:
            self._model_norm = InputNorm(model, "final_norm", model.stage.spec.final_norm, input_form="tensor")

        def norm(name: str) -> NormLayer | None:
            return None if spec.norm is None else NormLayer(loader, f"head_input.{name}", spec.norm)

        self._token_norm, self._hidden_norm = norm("token_norm"), norm("hidden_norm")
        self._sources_norm = norm("sources_norm") if spec.sources_norm else None
        numbers = range(len(spec.sources) * spec.source_norms)
        self._source_norms = [one for number in numbers if (one := norm(f"source_norms.{number}")) is not None]
        name = "head_input.projection"
        self._projection = plain.Format().pack_linear(context.kernels, loader.read(f"{name}.weight"))
        loader.on_loaded(self._projection.nbytes)
        self._bias = loader.load(f"{name}.bias") if spec.bias else None
        spans = context.spans(f"{name}.weight")
        self._own, self._widths = spans[context.group.rank], [span.size for span in spans]
        self._one = torch.ones(1, device=context.device)
        self._hidden_first, self._returns_normed = spec.hidden_first, spec.returns_normed
        self._residual_normed = spec.residual_normed
        self._final_norm: InputNorm | None = None
        if spec.output_norm:
            self._final_norm = InputNorm(loader, "final_norm", context.spec.final_norm, input_form="tensor")

    def kept_columns(self, rows: Tensor) -> Tensor:
        """What this rank keeps of `KeptOutput.rows_of`: its columns of [M, H]."""
        if self._model_norm:
            return rows[:, self._own.start : self._own.stop]
        if self._source_norms:
            parts = rows.chunk(len(self._source_norms), dim=1)
            rows = torch.cat([norm(part) for norm, part in zip(self._source_norms, parts, strict=True)], dim=1)
        return self._projection(self._sources_norm(rows) if self._sources_norm else rows, self._bias)

    def read_kept(self, rows: Tensor) -> Tensor:
        """All columns of what was kept, [M, H] -> hidden states of the model, [M, H]."""
        return as_tensor(self._model_norm(rows)[0]) if self._model_norm else rows

    def embed(self, token_ids: Tensor, rows: Rows) -> Tensor:
        """The embedding of the tokens behind M rows, [M, H]."""
        return self._embedding(token_ids, rows)

    def join(self, step: StepInput, token: Tensor, hidden: Tensor) -> tuple[StepInput, Tensor]:
        """The step and the input of the head's layers, [M, H], for the embedding of the tokens behind M rows and the
        `hidden` states of the rows."""
        normed = hidden
        if self._token_norm is not None and self._hidden_norm is not None:
            token, normed = self._token_norm(token), self._hidden_norm(hidden)
        both = join_columns(self._kernels, (normed, token) if self._hidden_first else (token, normed), self._one)
        if self._model_norm is None:
            step = dataclasses.replace(step, rows=with_inputs(step.rows, both))
            return step, normed if self._residual_normed else hidden
        joined = self._projection(both, self._bias)
        return step, joined if self._group.size == 1 else self._group.all_gather_columns(joined, self._widths)

    def name_tokens(self, best: list[int]) -> list[int]:
        """The model's ids of tokens of the lm_head."""
        return best if self._token_ids is None else [self._token_ids[token] for token in best]

    def finish(self, output: Tensor, table: Rows) -> tuple[Tensor, Tensor]:
        """The output of the layers, [R, H] -> the hidden states that the head reads behind a guess, [R, H], and the
        best of this rank's logits in each row, see `LMHead.find_best`, or the logits themselves where the lm_head does
        not fuse that."""
        normed = output if self._final_norm is None else as_tensor(self._final_norm(output)[0])
        best = self.lm_head.find_best(normed) if self.lm_head.fuses_argmax else self.lm_head(normed, table)
        return (normed if self._returns_normed else output), best

    def copy_rows(self, rows: Tensor, out: Tensor) -> None:
        """Copy [R, H] with a kernel, so that recorded passes repeat it."""
        self._kernels.scale_rows(rows, self._one, None, out)
