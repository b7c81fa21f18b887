"""From logits to tokens. Every rank of the last stage samples every row, from equal bits to equal tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Rows

import numpy as np
import torch
from torch import Tensor

from shardline.models.partition import Span
from shardline.runtime.ops.linear_argmax import best_of
from shardline.runtime.ops.logprobs import logprobs
from shardline.runtime.ops.sampling import sample
from shardline.runtime.parallel.collectives import Collectives
from shardline.runtime.sampling.adjustments import adjust_logits, needs_adjustment
from shardline.runtime.sequences import Sequence, SequenceTable
from shardline.types import SequenceResult, TokenLogprobs


class Sampler:
    """Chooses the next token of each row of vocab-parallel logits.

    A token depends on its row, the request's parameters and the counter-based random number of (seed, choice,
    position): never on the other rows.
    """

    def __init__(self, spans: Rows[Span], group: Collectives) -> None:
        """`spans`: the vocabulary range of each rank of `group`."""
        self._spans = tuple(spans)
        self._group = group

    @staticmethod
    def is_greedy(seq_ids: Rows[int], table: SequenceTable) -> bool:
        """Whether `choose` answers all that these sequences ask for; False where there are none."""
        return len(seq_ids) > 0 and not any(_needs_whole_row(table[seq_id]) for seq_id in seq_ids)

    def choose(self, best: Tensor, seq_ids: Rows[int]) -> list[SequenceResult]:
        """Results for the best of each row on this rank, [num_rows, 2] as of `ops.linear_argmax`: the largest over the
        ranks; ties go to the lowest id, as spans are in order."""
        gathered = self._group.all_gather_columns(best, [2] * self._group.size).cpu()
        values = gathered[:, 0::2].numpy()
        ids = gathered[:, 1::2].contiguous().view(torch.int32).numpy()
        rank = np.argmax(values, axis=1)
        first = np.array([span.start for span in self._spans])
        tokens = ids[np.arange(len(rank)), rank] + first[rank]
        return [SequenceResult(seq_id, [int(token)]) for seq_id, token in zip(seq_ids, tokens, strict=True)]

    def sample(self, local_logits: Tensor, seq_ids: Rows[int], table: SequenceTable) -> list[SequenceResult]:
        """Results for rows [num_rows, local vocab] of fp32 logits, one per sequence. The logits may be overwritten."""
        if self.is_greedy(seq_ids, table):
            return self.choose(best_of(local_logits), seq_ids)
        sequences = [table[seq_id] for seq_id in seq_ids]
        gathered = self._group.all_gather_columns(local_logits, [span.size for span in self._spans])
        # Digests, adjustments and log-probabilities are the host's; tokens are drawn where the logits were computed.
        logits = gathered.cpu()
        digests = [
            [_digest(row)] if sequence.sampling.logits_digest else None
            for sequence, row in zip(sequences, logits, strict=True)
        ]
        reports_logprobs = any(sequence.sampling.logprobs is not None for sequence in sequences)
        raw = logits.clone() if reports_logprobs else logits
        adjust_logits(logits, sequences)
        tokens = _sample(logits.to(gathered.device), sequences)
        reported = _logprobs(raw, tokens, sequences) if reports_logprobs else [None] * len(tokens)
        return [
            SequenceResult(seq_id, [token], None if logprob is None else [logprob], digest)
            for seq_id, token, logprob, digest in zip(seq_ids, tokens, reported, digests, strict=True)
        ]


def _needs_whole_row(sequence: Sequence) -> bool:
    params = sequence.sampling
    return params.temperature > 0.0 or params.logprobs is not None or params.logits_digest or needs_adjustment(sequence)


def _sample(logits: Tensor, sequences: Rows[Sequence]) -> list[int]:
    params = [sequence.sampling for sequence in sequences]
    seeds = np.array([(p.seed or 0) & (2**64 - 1) for p in params], dtype=np.uint64).view(np.int64)

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(logits.device)

    tokens = sample(
        logits,
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int32),
        top_p=column([p.top_p for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
        seeds=torch.from_numpy(seeds).to(logits.device),
        choices=column([sequence.choice for sequence in sequences], torch.int64),
        positions=column([sequence.num_tokens for sequence in sequences], torch.int64),
    )
    return [int(token) for token in tokens.tolist()]


def _logprobs(logits: Tensor, tokens: list[int], sequences: Rows[Sequence]) -> list[TokenLogprobs | None]:
    widest = max(sequence.sampling.logprobs or 0 for sequence in sequences)
    chosen, ranks, top_ids, top_logprobs = logprobs(logits, torch.tensor(tokens, dtype=torch.int64), widest)
    reported: list[TokenLogprobs | None] = []
    for row, sequence in enumerate(sequences):
        wanted = sequence.sampling.logprobs
        if wanted is None:
            reported.append(None)
            continue
        reported.append(
            TokenLogprobs(
                logprob=float(chosen[row]),
                rank=int(ranks[row]),
                top_ids=[int(token) for token in top_ids[row, :wanted].tolist()],
                top_logprobs=[float(value) for value in top_logprobs[row, :wanted].tolist()],
            )
        )
    return reported


def _digest(row: Tensor) -> str:
    return hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest()
