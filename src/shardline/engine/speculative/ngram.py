"""Drafts without a model: what followed the last tokens of a sequence when they occurred before.

The idea is prompt lookup decoding (A. Saxena, 2023), which vLLM calls ngram.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from shardline.config.speculation import Speculation
from shardline.engine.scheduling.sequence import LiveSequence
from shardline.messages.stats import DraftStats
from shardline.messages.step import SequenceResult, SequenceStep

_LONGEST_PAUSE = 31
"""Steps."""


class NgramProposer:
    """A `Proposer` that answers at once.

    A draft may be twice as long as the one before if all of that one was accepted, and otherwise one token longer than
    what was accepted. After several drafts that were wholly wrong, more and more steps go without one. So a text that
    nobody can guess costs little.
    """

    def __init__(self, config: Speculation) -> None:
        self._config = config
        self._lookups: WeakKeyDictionary[LiveSequence, PromptLookup] = WeakKeyDictionary()
        self._num_drafts = 0
        self._num_tokens = 0
        self._accepted = [0] * config.num_speculative_tokens

    def propose(self, sequence: LiveSequence, limit: int) -> list[int]:
        """See `Proposer`."""
        limit = min(limit, sequence.limit - len(sequence.tokens) - 1)
        if limit <= 0 or sequence.request.constraints is not None:
            return []
        lookup = self._lookups.get(sequence)
        if lookup is None:
            lookup = self._lookups[sequence] = PromptLookup(self._config)
        if lookup.pause:
            lookup.pause -= 1
            return []
        return lookup.find_continuation(sequence.tokens, min(limit, lookup.length))

    def note_result(self, sequence: LiveSequence, step: SequenceStep, result: SequenceResult) -> None:
        """Note how many tokens of a step's draft were accepted."""
        if (num_proposed := len(step.draft_token_ids)) == 0:
            return
        lookup, num_accepted = self._lookups[sequence], len(result.token_ids) - 1
        self._num_drafts += 1
        self._num_tokens += num_proposed
        for position in range(num_accepted):
            self._accepted[position] += 1
        length = 2 * num_accepted if num_accepted == num_proposed else num_accepted + 1
        lookup.length = min(length, self._config.num_speculative_tokens)
        lookup.misses = 0 if num_accepted else lookup.misses + 1
        lookup.pause = min(2 ** max(lookup.misses - 1, 0) - 1, _LONGEST_PAUSE)

    def stats(self) -> DraftStats:
        """Counters since the engine's start."""
        return DraftStats(self._num_drafts, self._num_tokens, list(self._accepted))


class PromptLookup:
    """Finds earlier occurrences of the last tokens of one sequence.

    Tokens are kept as a text, one character for each, because Python searches texts at the speed of C.
    """

    def __init__(self, config: Speculation) -> None:
        self._config = config
        self._text = ""
        self.length = config.num_speculative_tokens
        """The most tokens of the next draft."""
        self.misses = 0
        """How many drafts were wholly wrong since the last one that was not."""
        self.pause = 0
        """Steps that go without a draft."""

    def find_continuation(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that may follow `tokens`, which must begin with those of the last call.

        They followed the latest earlier occurrence of as many of the last tokens as possible.
        """
        self._text += "".join(map(chr, tokens[len(self._text) :]))
        text, config = self._text, self._config
        for count in range(min(config.prompt_lookup_max, len(text) - 1), config.prompt_lookup_min - 1, -1):
            place = text.rfind(text[-count:], 0, len(text) - 1)
            if place >= 0:
                return list(map(ord, text[place + count : place + count + limit]))
        return []
