"""Token ids to text as they arrive; one object per choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shardline.text.byte_level import ByteLevelDetokenizer
from shardline.text.tokenizer import Tokenizer
from shardline.text.window_detokenizer import WindowDetokenizer


class Detokenizer(Protocol):
    """Turns ids into the text that they add, and never returns half a character.

    The result does not depend on how the ids are grouped into calls: together the pieces are the text that follows the
    prompt in `tokenizer.decode(prompt + output)`.
    """

    def add_tokens(self, ids: Sequence[int]) -> str:
        """The text that the next ids add. An incomplete character is held back."""

    def flush_text(self) -> str:
        """The text held back so far; incomplete characters become U+FFFD. Call it after the last token."""


def make_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    shown_token_ids: frozenset[int] = frozenset(),
) -> Detokenizer:
    """The detokenizer of one choice. `shown_token_ids`: special tokens that are not skipped."""
    hidden = tokenizer.special_token_ids - shown_token_ids if skip_special_tokens else frozenset()
    if tokenizer.byte_tokens is not None:
        return ByteLevelDetokenizer(tokenizer.byte_tokens, prompt_token_ids, hidden)
    return WindowDetokenizer(tokenizer, prompt_token_ids, hidden)
