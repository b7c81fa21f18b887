"""Token ids to text as they arrive; one object per choice."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from shardline.text.tokenizer import ByteTokens, Tokenizer
from shardline.text.window_detokenizer import TAIL_TOKENS, WindowDetokenizer


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


class ByteLevelDetokenizer:
    """For tokenizers whose text is the bytes of its tokens: no token changes the text of another one."""

    __slots__ = ("_begun", "_decoder", "_hidden", "_holds_bytes", "_texts", "_tokens")

    def __init__(self, tokens: ByteTokens, prompt_token_ids: Sequence[int], hidden: frozenset[int]) -> None:
        self._tokens = tokens
        self._texts = tokens.texts
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds_bytes = False
        # If the prompt ends in half a character, that character belongs to the output that completes it.
        tail = [token_id for token_id in prompt_token_ids[-4 * TAIL_TOKENS :] if token_id not in hidden]
        self._decode_bytes(b"".join([tokens.decode(token_id) for token_id in tail[-TAIL_TOKENS:]]))
        self._begun = False

    def add_tokens(self, ids: Sequence[int]) -> str:
        """See Detokenizer."""
        text = ""
        for token_id in ids:
            piece = None if self._holds_bytes else self._texts.get(token_id)
            if piece is not None:
                text += piece
            elif token_id not in self._hidden and (data := self._tokens.decode(token_id)):
                self._begun = True
                text += self._decode_bytes(data)
        return text

    def flush_text(self) -> str:
        """See Detokenizer."""
        if not (self._begun and self._holds_bytes):
            return ""
        self._holds_bytes = False
        return self._decoder.decode(b"", True)

    def _decode_bytes(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        self._holds_bytes = bool(self._decoder.getstate()[0])
        return text
