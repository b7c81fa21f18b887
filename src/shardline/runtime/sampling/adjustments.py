"""Penalties, biases and bans of a batch of rows, as the ragged arrays for one kernel call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardline.runtime.ops.sampling.penalties import Penalties
from shardline.runtime.sequences import NO_TOKEN, WorkerSequence, stand_in

_NO_IDS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


def penalties_of(sequences: Sequence[WorkerSequence]) -> Penalties:
    """The changes that each sequence's request asks for in its row of logits.

    These are: repetition penalty over prompt and output, presence and frequency penalties over the output, logit
    biases, and a ban of end tokens until min_tokens.
    """
    rows = [_row(sequence) for sequence in sequences]
    offsets = np.cumsum([0, *(len(row.ids) for row in rows)], dtype=np.int32)
    params = [sequence.sampling for sequence in sequences]
    return Penalties(
        offsets=torch.from_numpy(offsets),
        ids=torch.from_numpy(np.concatenate([row.ids for row in rows]).astype(np.int32)),
        output_counts=torch.from_numpy(np.concatenate([row.counts for row in rows])),
        in_prompt=torch.from_numpy(np.concatenate([row.in_prompt for row in rows])),
        bias=torch.from_numpy(np.concatenate([row.bias for row in rows])),
        repetition=torch.tensor([p.repetition_penalty for p in params], dtype=torch.float32),
        presence=torch.tensor([p.presence_penalty for p in params], dtype=torch.float32),
        frequency=torch.tensor([p.frequency_penalty for p in params], dtype=torch.float32),
        uncounted=_uncounted(sequences),
    )


def _uncounted(sequences: Sequence[WorkerSequence]) -> Tensor | None:
    """Stand-ins for tokens that steps in flight sample; the counts do not include these tokens yet."""
    if not any(sequence.has_penalties and sequence.num_pending for sequence in sequences):
        return None
    assert all(sequence.num_pending <= 1 for sequence in sequences), "a row can have only one uncounted token"
    pending = [sequence.has_penalties and sequence.num_pending > 0 for sequence in sequences]
    tokens = [
        stand_in(sequence.row) if is_pending else NO_TOKEN
        for sequence, is_pending in zip(sequences, pending, strict=True)
    ]
    return torch.tensor(tokens, dtype=torch.int64)


class _Row(NamedTuple):
    """The tokens of one row whose logits change, and their changes."""

    ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int32]
    in_prompt: npt.NDArray[np.bool_]
    bias: npt.NDArray[np.float32]


def _row(sequence: WorkerSequence) -> _Row:
    """Copies the prompt's distinct tokens, and loops in Python only over the few tokens that were generated or have a
    bias."""
    in_prompt_ids = sequence.prompt_ids if sequence.sampling.repetition_penalty != 1.0 else _NO_IDS
    biases = _biases(sequence)
    changed_ids = np.array(sorted(sequence.output_counts.keys() | biases.keys()), dtype=np.int64)
    places = np.searchsorted(in_prompt_ids, changed_ids)
    known = np.zeros(len(changed_ids), dtype=np.bool_)
    inside = places < len(in_prompt_ids)
    known[inside] = in_prompt_ids[places[inside]] == changed_ids[inside]
    ids = np.concatenate([in_prompt_ids, changed_ids[~known]])
    places[~known] = len(in_prompt_ids) + np.arange(np.count_nonzero(~known))
    counts = np.zeros(len(ids), dtype=np.int32)
    counts[places] = [sequence.output_counts.get(token_id, 0) for token_id in changed_ids.tolist()]
    bias = np.zeros(len(ids), dtype=np.float32)
    bias[places] = [biases.get(token_id, 0.0) for token_id in changed_ids.tolist()]
    return _Row(ids, counts, np.arange(len(ids)) < len(in_prompt_ids), bias)


def _biases(sequence: WorkerSequence) -> dict[int, float]:
    bias = dict(sequence.sampling.logit_bias)
    if sequence.ends_are_banned:
        for token_id in (*sequence.eos_token_ids, *sequence.sampling.stop_token_ids):
            bias[token_id] = float("-inf")
    return bias
