"""Steps with drafts. Each position of a draft has a row, which is sampled as if the tokens before it were right. Those
that were right are kept, so the tokens are the same as without drafts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardline.messages.step import SequenceResult, SequenceStep
from shardline.runtime.features.base import Feature, RunningStep
from shardline.runtime.sequences import WorkerSequence


class Drafts(Feature):
    """Joins the rows of each draft to one result."""

    def begin(self, running: RunningStep) -> Drafts | None:
        return self if len(running.rows) > len(running.sampled) else None

    def result(self, running: RunningStep, results: list[SequenceResult]) -> list[SequenceResult]:
        return join_rows([step.draft_token_ids for step in running.plan.steps if step.sample], results)


def sampled_rows(steps: Iterable[SequenceStep], sequences: Iterable[WorkerSequence]) -> list[WorkerSequence]:
    """For each sampled row of a plan, its sequence with the tokens that come before the sampled one."""
    rows = []
    for step, sequence in zip(steps, sequences, strict=True):
        if step.draft_token_ids:
            rows += [sequence.with_guesses(count) for count in range(len(step.draft_token_ids) + 1)]
        elif step.sample:
            rows.append(sequence)
    return rows


def join_rows(drafts: Sequence[Sequence[int]], rows: Iterable[SequenceResult]) -> list[SequenceResult]:
    """The result of each sampled sequence, of which `drafts` has the guesses, from those of the rows.

    It has the tokens up to the first one that differs from its guess.
    """
    left = iter(rows)
    return [_join(draft, left) for draft in drafts]


def _join(draft: Sequence[int], rows: Iterator[SequenceResult]) -> SequenceResult:
    first = next(rows)
    if not draft:
        return first
    found = [first, *(next(rows) for _ in draft)]
    right = 0
    while right < len(draft) and found[right].token_ids[0] == draft[right]:
        right += 1
    kept = found[: right + 1]
    return SequenceResult(
        first.seq_id,
        [token for row in kept for token in row.token_ids],
        None if first.logprobs is None else [one for row in kept for one in row.logprobs or ()],
        None if first.digests is None else [one for row in kept for one in row.digests or ()],
    )
