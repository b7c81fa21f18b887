"""Steps with drafts. Each position of a draft has a row, which is sampled as if the tokens before it were right. Those
that were right are kept, so the tokens are the same as without drafts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardline.messages.step import SequenceResult
from shardline.runtime.features.base import Feature, RunningStep


class Drafts(Feature):
    """Joins the rows of each draft to one result."""

    step_fields = ("draft_token_ids",)

    def begin(self, running: RunningStep) -> Drafts:
        return self

    def result(self, running: RunningStep, results: list[SequenceResult]) -> list[SequenceResult]:
        return join_rows([step.draft_token_ids for step in running.plan.steps if step.sample], results)


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
