"""How many tokens of an answer are reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.text.reasoning_parsers.base import ReasoningParser
from shardline.text.tokenizer import Tokenizer


class ReasoningCounter:
    """Counts the tokens of one answer up to the end of its reasoning, the marks and the space behind them included."""

    def __init__(self, parser: ReasoningParser, tokenizer: Tokenizer) -> None:
        """`parser`: a parser that has read nothing, and that nobody else uses."""
        self._parser = parser
        self._tokenizer = tokenizer
        self._num_seen = 0
        self._count = 0

    def count_tokens(self, token_ids: Sequence[int]) -> int:
        """The number of reasoning tokens in the answer so far; `token_ids` are all of its tokens."""
        while self._num_seen < len(token_ids) and not self._parser.is_over:
            piece = self._tokenizer.token_bytes(token_ids[self._num_seen])
            # Half a character is no part of a mark.
            _, rest = self._parser.add_text(piece.decode("utf-8", "replace"))
            self._num_seen += 1
            self._count += not rest
        return self._count if self._parser.is_marked else 0
