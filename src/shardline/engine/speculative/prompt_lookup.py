"""Drafts without a model: what followed the last tokens of a sequence when they occurred before.

The idea is prompt lookup decoding (A. Saxena, 2023), which vLLM calls ngram.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardline.config.speculation import Speculation


class PromptLookup:
    """Finds earlier occurrences of the last tokens of one sequence.

    Tokens are kept as a text, one character for each, because Python searches texts at the speed of C.
    """

    def __init__(self, asked: Speculation) -> None:
        self._asked = asked
        self._text = ""
        self.length = asked.num_speculative_tokens
        """The most tokens of the next draft."""
        self.misses = 0
        """How many drafts were wholly wrong since the last one that was not."""
        self.pause = 0
        """Steps that go without a draft."""

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `tokens`, which must begin with those of the last call.

        They followed the latest earlier occurrence of as many of the last tokens as possible.
        """
        self._text += "".join(map(chr, tokens[len(self._text) :]))
        text, asked = self._text, self._asked
        for count in range(min(asked.prompt_lookup_max, len(text) - 1), asked.prompt_lookup_min - 1, -1):
            place = text.rfind(text[-count:], 0, len(text) - 1)
            if place >= 0:
                return list(map(ord, text[place + count : place + count + most]))
        return []
