"""What a scheduler needs of whatever proposes draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shardline.config.speculation import Speculation
from shardline.engine.scheduling.sequence import LiveSequence
from shardline.messages.stats import DraftStats
from shardline.messages.step import SequenceResult, SequenceStep


class Proposer(Protocol):
    """Proposes tokens of sequences. Texts do not depend on it: workers accept the tokens that they sample anyway.

    A proposer may answer at once, from a sequence's tokens. If its guesses are computed by a step, it learns them from
    that step's result, and proposes them for a later plan.
    """

    def wants(self, sequence: LiveSequence) -> bool:
        """Whether the next step of a sequence may have a draft, so that it waits until all tokens are known."""

    def count_guesses(self, sequence: LiveSequence, limit: int) -> int:
        """`num_guesses` of a step that decodes; up to `limit` of them can become a draft."""

    def propose(
        self, sequence: LiveSequence, limit: int, new_tokens: Sequence[int] = (), guesses: Sequence[int] = ()
    ) -> list[int]:
        """`draft_token_ids`: up to `limit` tokens that may follow those of a sequence; none, unless all of its tokens
        are known. It is called for each step that decodes.

        At least one token that the sequence may still get remains for the step to sample. For a sequence with a grammar
        it is called before its `new_tokens` are applied, as soon as they are there, with the `guesses` of the same
        result: the grammar must allow them.
        """

    def note_result(self, sequence: LiveSequence, step: SequenceStep, result: SequenceResult) -> None:
        """Note the result of each step that samples, before its tokens become the sequence's."""

    def note_end(self, sequence: LiveSequence) -> None:
        """Note that a sequence has all of its answer, unless it ends by an error."""

    def note_decode(self, num_sequences: int, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Note a step that only decoded so many sequences, sampled so many rows with those of drafts, and got so many
        tokens, and the time since the end of the step before it."""

    def stats(self) -> DraftStats:
        """Counters since the engine's start."""


def make_proposer(config: Speculation) -> Proposer | None:
    """The proposer that the user has chosen; None: nothing is drafted."""
    if config.num_speculative_tokens == 0:
        return None
    if config.draft is not None:
        from shardline.engine.speculative.model import ModelProposer

        return ModelProposer(config)
    if config.suffixes.max_tree_depth:
        from shardline.engine.speculative.suffix import SuffixProposer

        return SuffixProposer(config)
    from shardline.engine.speculative.ngram import PromptLookup
    from shardline.engine.speculative.text_proposer import TextProposer

    return TextProposer(config, lambda _: PromptLookup(config.prompt_lookup_min, config.prompt_lookup_max))
