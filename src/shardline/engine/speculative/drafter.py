"""Which sequences of a plan get a draft, how long it is, and how many of its tokens were accepted."""

from __future__ import annotations

from shardline.config.speculation import Speculation
from shardline.engine.sequence import LiveSequence
from shardline.engine.speculative.prompt_lookup import PromptLookup
from shardline.messages.stats import DraftStats
from shardline.messages.step import SequenceStep

_LONGEST_PAUSE = 31
"""Steps."""


class Drafter:
    """Drafts tokens of sequences. Their text does not depend on it: workers accept the tokens that they sample anyway.

    A draft may be twice as long as the one before if all of that one was accepted, and otherwise one token longer than
    what was accepted. After several drafts that were wholly wrong, more and more steps go without one. So a text that
    nobody can guess costs little.
    """

    def __init__(self, asked: Speculation) -> None:
        self._asked = asked
        self._num_drafts = 0
        self._num_tokens = 0
        self._accepted = [0] * asked.num_speculative_tokens

    def propose(self, sequence: LiveSequence, most: int) -> list[int]:
        """Up to `most` tokens that may follow those of a sequence whose tokens are all known.

        A sequence with constraints gets none: its grammar reads tokens one after another, and cannot go back.
        """
        most = min(most, sequence.limit - len(sequence.tokens) - 1)
        if most <= 0 or sequence.request.constraints is not None:
            return []
        if sequence.lookup is None:
            sequence.lookup = PromptLookup(self._asked)
        lookup = sequence.lookup
        if lookup.pause:
            lookup.pause -= 1
            return []
        return lookup.guess(sequence.tokens, min(most, lookup.length))

    def note_result(self, sequence: LiveSequence, step: SequenceStep, num_accepted: int) -> None:
        """Note how many tokens of a step's draft were accepted."""
        lookup = sequence.lookup
        assert lookup is not None, "another drafter made this draft"
        self._num_drafts += 1
        self._num_tokens += len(step.draft)
        for position in range(num_accepted):
            self._accepted[position] += 1
        length = 2 * num_accepted if num_accepted == len(step.draft) else num_accepted + 1
        lookup.length = min(length, self._asked.num_speculative_tokens)
        lookup.misses = 0 if num_accepted else lookup.misses + 1
        lookup.pause = min(2 ** max(lookup.misses - 1, 0) - 1, _LONGEST_PAUSE)

    def stats(self) -> DraftStats:
        """Counters since the engine's start."""
        return DraftStats(self._num_drafts, self._num_tokens, list(self._accepted))
