"""Token ids to text as they arrive, for tokenizers whose tokens change the text of their neighbours."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from shardline.text.byte_level import TAIL_TOKENS

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 12


class Decoder(Protocol):
    """What it needs of a tokenizer."""

    def token_id(self, token: str | None) -> int | None: ...
    def token(self, token_id: int) -> str | None: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class WindowDetokenizer:
    """A `Detokenizer` for all tokenizers.

    The text of a token depends on its neighbours: a character may span several tokens, and decoders in the style of
    sentencepiece drop the first leading space. So a window of tokens is decoded, and the text of its older part
    (`ids[:read]`) is cut off.

    Neighbouring byte tokens (<0x..>) are decoded as one: if they are not UTF-8, each of them is U+FFFD. So the first
    window has no byte that is not part of a character, and if byte tokens that are not UTF-8 follow a returned
    character, that character stays.
    """

    def __init__(self, tokenizer: Decoder, prompt_token_ids: Sequence[int], hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        tail = [token_id for token_id in prompt_token_ids[-4 * TAIL_TOKENS :] if self._is_shown(token_id)]
        self._ids, half, self._half = self._split_tail(tail[-TAIL_TOKENS:])
        self._read = len(self._ids)
        self._shown = self._decode(0)
        # If the prompt ends in half a character, that character belongs to the output that completes it.
        self._ids += half
        self._begun = False

    def add_tokens(self, ids: Sequence[int]) -> str:
        """See Detokenizer."""
        return "".join([self._add_token(token_id) for token_id in ids])

    def flush_text(self) -> str:
        """See Detokenizer."""
        text = self._new_text(self._decode(0)) if self._begun and self._read < len(self._ids) else ""
        self._advance(len(self._ids))
        return text

    def _add_token(self, token_id: int) -> str:
        if not self._is_shown(token_id):
            return ""
        self._begun = True
        if self._half and not self._completes_half(token_id):
            self._ids = self._ids[: self._read]  # or else it would break the characters behind it
            return _REPLACEMENT + self._add_shown(token_id)
        return self._add_shown(token_id)

    def _completes_half(self, token_id: int) -> bool:
        """Whether a token goes on with the character in which the prompt ends; it does not end there any more."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        half, self._half = self._half, b""
        try:
            decoder.decode(half + (self._byte(token_id) or b"\xff"))
        except UnicodeDecodeError:
            return False
        self._half = decoder.getstate()[0]
        return True

    def _add_shown(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(0)
        if text.endswith(_REPLACEMENT):
            held = len(self._ids) - self._read
            return self._cut_window(text) if held >= _MAX_HELD_TOKENS else ""
        if len(text) <= len(self._shown):
            return ""
        delta = self._new_text(text)
        self._advance(len(self._ids))
        return delta

    def _split_tail(self, ids: Sequence[int]) -> tuple[list[int], list[int], bytes]:
        """The tokens of whole characters, without broken bytes, those of half a character at the end, and its bytes."""
        whole: list[int] = []
        held: list[int] = []
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        for token_id in ids:
            byte = self._byte(token_id)
            if byte is None:
                whole.append(token_id)
                decoder.reset()
                held = []
                continue
            char = decoder.decode(byte)
            held.append(token_id)
            whole += held[len(held) - len(char.encode()) :]
            held = held[len(held) - len(decoder.getstate()[0]) :]
        if ids and not whole:
            # Some text must stand before the output, or else the decoder drops its leading space.
            whole = [token_id for token_id in [self._tokenizer.token_id("<0x41>")] if token_id is not None]
        return whole, held, decoder.getstate()[0]

    def _byte(self, token_id: int) -> bytes | None:
        """What a byte token stands for; None: it is another token."""
        spelling = self._tokenizer.token(token_id) or ""
        is_byte = len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">")
        if not is_byte or self._tokenizer.decode([token_id], skip_special_tokens=False) == spelling:
            return None
        return bytes.fromhex(spelling[3:5])

    def _cut_window(self, text: str) -> str:
        """Return all text but the last four bytes', so that endless broken bytes do not make the window endless."""
        cut = len(self._ids) - 4
        tail = self._decode(cut)
        head = self._decode(0, cut)
        if head + tail != text or len(tail) < 4 or len(head) <= len(self._shown):
            return ""
        delta = self._new_text(head)
        self._advance(cut)
        return delta

    def _new_text(self, text: str) -> str:
        """The part of the window's text that was not returned yet."""
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        return self._decode(self._read)

    def _advance(self, read: int) -> None:
        """Drop the older part of the window; the ids up to `read` become its new older part."""
        self._ids = self._ids[self._read :]
        self._read = read - self._read
        self._shown = self._decode(0, self._read)

    def _decode(self, start: int, end: int | None = None) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=False)

    def _is_shown(self, token_id: int) -> bool:
        """Whether a token is decoded: hidden special tokens and padding of the vocabulary are not."""
        return token_id not in self._hidden and self._tokenizer.token(token_id) is not None
