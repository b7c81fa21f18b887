"""The rows of a draft: each is sampled as if the guesses before it were right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardline.runtime.sequences import WorkerSequence


def guessed_rows(sequences: Sequence[WorkerSequence]) -> list[WorkerSequence]:
    """For each row of sequences whose next token is sampled, the sequence with the tokens before the sampled one."""
    rows = []
    for sequence in sequences:
        if sequence.num_guessed:
            rows += [_with_guesses(sequence, count) for count in range(sequence.num_guessed + 1)]
        else:
            rows.append(sequence)
    return rows


def _with_guesses(sequence: WorkerSequence, count: int) -> WorkerSequence:
    """The sequence as if its first `count` guesses were right, and the others did not exist. It shares memory."""
    known = sequence.num_tokens - sequence.num_guessed
    guesses: list[int] = sequence.tokens[known : known + count].tolist()
    view = object.__new__(WorkerSequence)
    view.__dict__.update(sequence.__dict__)  # a fifth of the time of `copy.copy`; a draft has a view for each row
    view.num_tokens, view.num_guessed = known + count, 0
    if sequence.mask is not None:
        view.mask = sequence.mask.with_guesses(guesses)
    if sequence.has_penalties:
        view.output_counts = Counter(sequence.output_counts)
        view.output_counts.update(guesses)
    return view
