"""Marks the tokens of sequences with a secret key: before each draw, their logits change in a way that the key and the
last tokens decide. A detector finds the traces in the text.

The mark depends on the key, the sequence's tokens and its parameters only, and nothing is kept from step to step.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.ops.sampling.sample import GREEDY_BELOW
from shardline.runtime.ops.sampling.watermark import (
    MOST_CANDIDATES,
    Filters,
    Row,
    add_bonus_,
    filter_,
    hold_tournament_,
    strongest,
)
from shardline.runtime.sequences import WorkerSequence
from shardline.runtime.step import StepInput
from shardline.sampling_params import SamplingParams
from shardline.watermark.green_lists import GreenLists, Ints
from shardline.watermark.keys import KGWKey, SynthIDKey, WatermarkKey
from shardline.watermark.tournament import Tournament

_CACHED_BYTES = 16 << 20
"""Most memory for green lists that are kept."""
_TRIED = 40
"""With `selfhash`, only so many of the most likely tokens may be green, as in transformers."""


class Mark(Protocol):
    """How a scheme marks a row."""

    filters: bool
    """Whether `edit` applies the filters of the draw (top_k, top_p, min_p), which then has none."""
    keeps_greedy: bool
    """Whether greedy rows stay as they are."""

    def edit(self, row: Row, token_ids: Ints, first: int, sampling: SamplingParams) -> None:
        """Change the logits [V] of the token after `token_ids`, whose answer begins at `first`."""


class GreenMark:
    """A bonus for the green tokens, before the filters of the draw."""

    filters = False
    keeps_greedy = False

    def __init__(self, key: KGWKey, vocab_size: int) -> None:
        self._lists = GreenLists(key, vocab_size)
        self._bias = key.bias
        self._least = key.context_width
        """Tokens that must be there, as in transformers."""
        self._vocab_size = vocab_size
        self._known: OrderedDict[int, npt.NDArray[np.uint8]] = OrderedDict()
        self._most_known = max(1, 8 * _CACHED_BYTES // vocab_size)

    def edit(self, row: Row, token_ids: Ints, first: int, sampling: SamplingParams) -> None:
        if len(token_ids) < self._least:
            return
        context = token_ids[len(token_ids) - self._lists.context_width :]
        # The bonus counts at temperature 1, as in transformers: the odds of green tokens grow by exp(bias).
        bonus = self._bias * (1.0 if sampling.temperature < GREEDY_BELOW else sampling.temperature)
        add_bonus_(row, self._try_strongest(row, context) if self._lists.hashes_itself else self._list(context), bonus)

    def _list(self, context: Ints) -> npt.NDArray[np.bool_]:
        """The green tokens [V] after a context."""
        seed = self._lists.seed(context)
        bits = self._known.get(seed)
        if bits is None:
            ids = torch.randperm(self._vocab_size, generator=torch.Generator().manual_seed(seed))[: self._lists.size]
            green = np.zeros(self._vocab_size, dtype=np.bool_)
            green[ids.numpy()] = True
            self._known[seed] = bits = np.packbits(green)
            if len(self._known) > self._most_known:
                self._known.popitem(last=False)
        self._known.move_to_end(seed)
        return np.unpackbits(bits, count=self._vocab_size).view(np.bool_)

    def _try_strongest(self, row: Row, context: Ints) -> npt.NDArray[np.bool_]:
        """Those of the most likely tokens [V] that are green as the end of their own context."""
        green = np.zeros(self._vocab_size, dtype=np.bool_)
        for token_id in strongest(row, _TRIED).tolist():
            green[token_id] = self._lists.is_green(context, token_id)
        return green


class TournamentMark:
    """A tournament of the tokens that the filters leave."""

    filters = True
    keeps_greedy = True

    def __init__(self, key: SynthIDKey) -> None:
        self._tournament = Tournament(key)
        self._first = self._tournament.context_size if key.skip_first_ngram_calls else 0
        """The first token of an answer that has a mark."""

    def edit(self, row: Row, token_ids: Ints, first: int, sampling: SamplingParams) -> None:
        filter_(row, Filters(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p))
        size = self._tournament.context_size
        if len(token_ids) < size or len(token_ids) < first + self._first:
            return
        if self._tournament.is_repeated(token_ids, first):
            return
        context = self._tournament.hash_contexts(token_ids[len(token_ids) - size :])
        candidates = strongest(row, MOST_CANDIDATES)
        hold_tournament_(row, candidates, self._tournament.bits(context, candidates), sampling.temperature)


class Watermark(Feature):
    """Marks the rows of sequences that ask for it."""

    start_fields = ("sampling.watermarking",)

    def __init__(self, key: WatermarkKey, vocab_size: int) -> None:
        self._mark: Mark = GreenMark(key, vocab_size) if isinstance(key, KGWKey) else TournamentMark(key)

    def begin(self, running: RunningStep) -> StepWatermark | None:
        if running.sampling is None:
            return None
        rows = [row for row, sequence in enumerate(running.rows) if self._marks(sequence.sampling)]
        if not rows:
            return None
        running.greedy = False
        draws = running.sampling.inputs.draws
        if self._mark.filters and draws is not None:
            draws.top_k[rows], draws.top_p[rows], draws.min_p[rows] = 0, 1.0, 0.0
        return StepWatermark(self._mark, rows)

    def _marks(self, sampling: SamplingParams) -> bool:
        is_greedy = sampling.temperature < GREEDY_BELOW
        return bool(sampling.watermarking) and not (is_greedy and self._mark.keeps_greedy)


class StepWatermark(Feature):
    """The marked rows of one step."""

    def __init__(self, mark: Mark, rows: list[int]) -> None:
        self._mark = mark
        self._rows = rows

    def after_forward(self, running: RunningStep, step: StepInput, output: Tensor) -> None:
        """The mark depends on the last tokens, so this waits for steps in flight that sample them."""
        running.wait_for_tokens([running.rows[row] for row in self._rows])
        running.editors.append(self._edit)

    def _edit(self, running: RunningStep, logits: Tensor) -> None:
        for row in self._rows:
            sequence: WorkerSequence = running.rows[row]
            values = logits[row].cpu()  # one row at a time needs little of a device's memory
            tokens = sequence.tokens[: sequence.num_tokens]
            self._mark.edit(values.numpy(), tokens, sequence.num_prompt_tokens, sequence.sampling)
            logits[row] = values
