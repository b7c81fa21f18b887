"""Where the last tokens of a sequence occurred in it before.

The idea is prompt lookup decoding (A. Saxena, 2023), which vLLM calls ngram.
"""

from __future__ import annotations

from collections.abc import Sequence


class PromptLookup:
    """Finds earlier occurrences of the last tokens of one sequence.

    Tokens are kept as a text, one character for each, because Python searches texts at the speed of C.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        """How many last tokens are searched: as many as possible between the two."""
        self._shortest, self._longest = shortest, longest
        self._text = ""

    def find_continuation(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that may follow `tokens`, which must begin with those of the last call.

        They followed the latest earlier occurrence of as many of the last tokens as possible.
        """
        end, length = self.find_match(tokens)
        return self.read(end, limit) if length else []

    def find_match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Where the latest earlier occurrence of as many of the last tokens as possible ends, and how many these are;
        0: there is none. `tokens` must begin with those of the last call."""
        self._text += "".join(map(chr, tokens[len(self._text) :]))
        text = self._text
        last, longest = len(text) - 1, min(self._longest, len(text) - 1)
        end = length = 0
        wanted = self._shortest
        while wanted <= longest and (place := text.rfind(text[-wanted:], 0, last)) >= 0:
            end, length = place + wanted, wanted
            while length < longest and length < end and text[end - length - 1] == text[last - length]:
                length += 1
            wanted = length + 1
        return end, length

    def read(self, start: int, limit: int) -> list[int]:
        """Up to `limit` tokens from this place on."""
        return list(map(ord, self._text[start : start + limit]))
