"""A head on the ranks of the last stage: it reads hidden states of the model, and its guesses are the next draft.
Earlier stages send it what it reads of their layers.

The row of a token has the hidden state of this token and the embedding of the next one, and guesses the one after. So
it can be computed once the next token is known. Hidden states lie in pages under the same block ids as the keys of the
model, whose steps write them; ranks share their columns. So they are there for whatever part of a sequence is computed
late, or was computed for another sequence. A block that came back from an offloading tier has those of another text:
its guesses are worse, and answers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shardline.deployment.deployment import Deployment
from shardline.models.partition import split_dim
from shardline.runtime.decoder import DecoderStage
from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.features.draft_model import DraftModel, Part, draft_sizes
from shardline.runtime.layers.head import Head
from shardline.runtime.layers.kept_output import KeptOutput
from shardline.runtime.machines.base import Backend
from shardline.runtime.ops.sampling.sample import find_best
from shardline.runtime.parallel.collectives import Collectives, StageLink
from shardline.runtime.sequences import SequenceTable
from shardline.runtime.step import StepInput


class SentStates(Feature):
    """On a stage before the last one: hands on the hidden states that the head reads."""

    def __init__(self, kept: KeptOutput, previous: StageLink | None, following: StageLink) -> None:
        self._kept, self._previous, self._following = kept, previous, following

    def begin(self, running: RunningStep) -> SentStates:
        return self

    def prepare(self, running: RunningStep, step: StepInput) -> StepInput:
        self._kept.receive(self._previous, step)
        return step

    def after_forward(self, running: RunningStep, step: StepInput, output: Tensor) -> None:
        self._kept.send(self._following, step)


class DraftHead(DraftModel):
    """As `DraftModel`, for a head."""

    next_token = 1

    def __init__(
        self,
        deployment: Deployment,
        backend: Backend,
        stage: DecoderStage,
        head: Head,
        kept: KeptOutput,
        group: Collectives,
        num_blocks: int,
        sequences: SequenceTable,
        previous: StageLink | None,
    ) -> None:
        """`kept`: the hidden states of the model that the head reads; `group`: the ranks that share its layers;
        `previous`: where those of other stages come from."""
        super().__init__(deployment, backend, stage, head.lm_head, num_blocks, sequences)
        self._head, self._kept, self._previous, self._collectives = head, kept, previous, group
        columns = split_dim(deployment.spec.hidden_size, group.size)
        self._widths = [span.size for span in columns]
        assert deployment.draft is not None
        num_rows = (num_blocks + deployment.draft.num_spare_blocks) * deployment.cache.block_size
        self._pages = backend.pages_empty((num_rows, columns[group.rank].size), getattr(torch, deployment.dtype))
        self.num_bytes += self._pages.nbytes
        sizes = draft_sizes(deployment)
        self._memory = self._pages.new_empty(sizes.max_seqs, deployment.spec.hidden_size)
        """What short passes read of rows, and then leave of the same rows for the next pass."""
        self._left = self._memory[:0]
        """[parts, hidden_size]: what the last pass has left for the next one."""
        self._forward, self._forward_guesses = (
            backend.make_replay(partial(self._run_short, behind_guesses), sizes, can_capture=False)
            for behind_guesses in (False, True)
        )

    def begin(self, running: RunningStep) -> DraftHead:
        return self

    def prepare(self, running: RunningStep, step: StepInput) -> StepInput:
        self._kept.receive(self._previous, step)
        return step

    def after_forward(self, running: RunningStep, step: StepInput, output: Tensor) -> None:
        columns = self._head.kept_columns(self._kept.rows_of(step))
        self._pages.index_copy_(0, self._slots_of(running, step), columns)

    def _slots_of(self, running: RunningStep, step: StepInput) -> Tensor:
        """The place of each row of a step of the model."""
        if self._context == 1:
            return step.rows.slots[self._group]
        # Ranks that share keys have slots for their own only, but hidden states of all rows.
        slots = []
        for entry, sequence in zip(running.plan.steps, running.stepped, strict=True):
            places = np.arange(entry.start, entry.start + entry.num_tokens)
            blocks = self._blocks(sequence)[places // self._block_size]
            slots.append(blocks * self._block_size + places % self._block_size)
        return torch.from_numpy(np.concatenate(slots))

    def _run(self, parts: Sequence[Part]) -> list[int]:
        return self._head.name_tokens(super()._run(parts))

    def _compute(self, step: StepInput, parts: Sequence[Part]) -> Tensor:
        places = [part.place for part in parts if part.place is not None]
        tokens = [part.asked.sequence.tokens[part.first + 1 : part.first + 1 + part.length] for part in parts]
        token = self._head.embed(torch.from_numpy(np.concatenate(tokens, dtype=np.int64)), step.rows)
        if step.is_replayable:
            self._place_hidden(step, places)
            best = (self._forward_guesses if places else self._forward)(step, token)
            self._left = self._memory[: len(best)]
        else:
            left, best = self._run_pass(step, token, self._read_hidden(step, places), bool(places))
            self._left = left.clone()  # a pass is not recorded while outputs of kernels are kept
        if len(self._left) > len(parts):
            self._left = self._left[np.cumsum([part.length for part in parts]) - 1]
        return best if self._fuses_argmax else find_best(self._kernels, best)

    def _run_pass(self, step: StepInput, token: Tensor, hidden: Tensor, behind_guesses: bool) -> tuple[Tensor, Tensor]:
        """See `Head.finish`, for the embedding of the next tokens and the hidden states of each row."""
        if not behind_guesses:
            hidden = self._head.read_kept(hidden)
        return self._head.finish(self._stage.forward(*self._head.join(step, token, hidden)), step.rows.narrow())

    def _run_short(self, behind_guesses: bool, step: StepInput, token: Tensor) -> Tensor:
        """As `_run_pass`, with hidden states in the memory of short passes: what a program repeats."""
        left, best = self._run_pass(step, token, self._memory[: len(token)], behind_guesses)
        self._head.copy_rows(left, self._memory[: len(left)])
        return best

    def _place_hidden(self, step: StepInput, places: Sequence[int]) -> None:
        """Put hidden states into the memory of short passes. A pass is not recorded while outputs of kernels are kept,
        so none is here."""
        hidden = self._read_hidden(step, places)
        if hidden.data_ptr() != self._memory.data_ptr():
            self._memory[: len(hidden)] = hidden

    def _read_hidden(self, step: StepInput, places: Sequence[int]) -> Tensor:
        """What the head reads of each row [M, H]: behind guesses, what the last pass has left of the parts at `places`;
        else what was kept of the model's step."""
        if not places:
            own = torch.index_select(self._pages, 0, step.rows.slots[0])
            return own if self._collectives.size == 1 else self._collectives.all_gather_columns(own, self._widths)
        return self._left if len(places) == len(self._left) else self._left[places]
