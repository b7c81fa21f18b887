"""Penalties, biases and bans of a batch of rows, as the ragged arrays that one kernel call takes."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from shardline.runtime.ops.penalties import Penalties, penalize_
from shardline.runtime.sequences import Sequence


def adjust_logits(logits: Tensor, sequences: Rows[Sequence]) -> None:
    """Apply what the requests ask for to [num_rows, vocab_size] fp32 logits, in place.

    Repetition penalty over prompt and output, presence and frequency penalties over the output, logit biases, and
    end tokens banned until min_tokens.
    """
    if not any(needs_adjustment(sequence) for sequence in sequences):
        return
    offsets, ids, counts, in_prompt, biases = [0], [], [], [], []
    for sequence in sequences:
        bias = _biases(sequence)
        prompt_ids = sequence.prompt_ids if sequence.sampling.repetition_penalty != 1.0 else frozenset()
        touched = sorted(prompt_ids | sequence.output_counts.keys() | bias.keys())
        ids += touched
        counts += [sequence.output_counts.get(token_id, 0) for token_id in touched]
        in_prompt += [token_id in prompt_ids for token_id in touched]
        biases += [bias.get(token_id, 0.0) for token_id in touched]
        offsets.append(len(ids))
    params = [sequence.sampling for sequence in sequences]
    penalize_(
        logits,
        Penalties(
            offsets=torch.tensor(offsets, dtype=torch.int32),
            ids=torch.tensor(ids, dtype=torch.int32),
            output_counts=torch.tensor(counts, dtype=torch.int32),
            in_prompt=torch.tensor(in_prompt, dtype=torch.bool),
            bias=torch.tensor(biases, dtype=torch.float32),
            repetition=torch.tensor([p.repetition_penalty for p in params], dtype=torch.float32),
            presence=torch.tensor([p.presence_penalty for p in params], dtype=torch.float32),
            frequency=torch.tensor([p.frequency_penalty for p in params], dtype=torch.float32),
        ),
    )


def needs_adjustment(sequence: Sequence) -> bool:
    """Whether anything but the raw logits decides this sequence's next token."""
    return sequence.has_penalties or bool(sequence.sampling.logit_bias) or _ends_are_banned(sequence)


def _ends_are_banned(sequence: Sequence) -> bool:
    return sequence.num_tokens - sequence.num_prompt_tokens < sequence.sampling.min_tokens


def _biases(sequence: Sequence) -> dict[int, float]:
    bias = dict(sequence.sampling.logit_bias)
    if _ends_are_banned(sequence):
        for token_id in (*sequence.eos_token_ids, *sequence.sampling.stop_token_ids):
            bias[token_id] = float("-inf")
    return bias
