"""Tokenizers whose text is the bytes of its tokens: the bytes of each token, and token ids to text as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from shardline.structured.vocabulary import byte_alphabet

TAIL_TOKENS = 12
"""Number of prompt tokens that are decoded with the first output: a character spans at most 4 byte tokens."""


class ByteTokens:
    """The bytes of tokens, each spelled once.

    `texts` has the texts of the tokens that were asked for, if they are whole characters and not special.
    """

    def __init__(self, spell: Callable[[int], str | None], special_token_ids: frozenset[int]) -> None:
        """`spell`: the token as the vocabulary spells it; None: the id is out of range."""
        self.texts: dict[int, str] = {}
        self._others: dict[int, bytes] = {}
        self._spell = spell
        self._alphabet = byte_alphabet()
        self._special_token_ids = special_token_ids

    def decode(self, token_id: int) -> bytes:
        """What a token adds to the bytes of a text; empty if the id is out of range."""
        if token_id in self.texts:
            return self.texts[token_id].encode()
        if token_id in self._others:
            return self._others[token_id]
        spelling = self._spell(token_id) or ""
        alphabet = self._alphabet
        in_alphabet = all(char in alphabet for char in spelling)
        raw = bytes(alphabet[char] for char in spelling) if in_alphabet else spelling.encode()
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            text = ""
        if text and token_id not in self._special_token_ids:
            self.texts[token_id] = text
        else:
            self._others[token_id] = raw
        return raw


class ByteLevelDetokenizer:
    """A `Detokenizer` for which no token changes the text of another one."""

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
