"""Prompts that have rows of hidden states in place of some tokens, which the first stage puts behind its embedding."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from shardline.messages.request import PromptEmbeds
from shardline.messages.step import SequenceStart
from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.sequences import WorkerSequence
from shardline.runtime.step import GivenRows, StepInput


class PromptRows(Feature):
    """Puts the rows of prompts into the steps that compute their positions."""

    start_fields = ("embeds",)

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device

    def start_sequence(self, sequence: WorkerSequence, start: SequenceStart) -> None:
        assert start.embeds is not None
        sequence.given = self._read(start.embeds)

    def _read(self, embeds: PromptEmbeds) -> GivenRows:
        rows = torch.from_numpy(np.frombuffer(embeds.rows, dtype=np.float32).copy()).view(-1, self._hidden_size)
        runs = [torch.arange(first, first + count) for first, count in embeds.places]
        return GivenRows(torch.cat(runs), rows.to(self._dtype))

    def begin(self, running: RunningStep) -> PromptRows | None:
        for entry, sequence in zip(running.plan.steps, running.stepped, strict=True):
            if sequence.given is not None and entry.start <= int(sequence.given.places[-1]):
                return self
        return None

    def prepare(self, running: RunningStep, step: StepInput) -> StepInput:
        places: list[Tensor] = []
        rows: list[Tensor] = []
        offset = 0
        for entry, sequence in zip(running.plan.steps, running.stepped, strict=True):
            if sequence.given is not None:
                bounds = torch.tensor([entry.start, entry.start + entry.num_tokens])
                first, last = torch.searchsorted(sequence.given.places, bounds).tolist()
                places.append(sequence.given.places[first:last] - entry.start + offset)
                rows.append(sequence.given.rows[first:last])
            offset += entry.num_tokens
        given = GivenRows(torch.cat(places).to(self._device), torch.cat(rows).to(self._device))
        return dataclasses.replace(step, given=given)
