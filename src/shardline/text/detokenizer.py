"""Token ids to text while they come, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence

from shardline.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_TAIL_TOKENS = 8
"""Prompt tokens decoded with the first output: a character spans at most 4 byte tokens."""
_MAX_HELD_TOKENS = 12


class Detokenizer:
    """Takes ids, returns the text that they add; never half a character.

    What a token decodes to depends on its neighbours: a character may span several tokens, and decoders in the manner
    of sentencepiece drop the first leading space. So a window of tokens is decoded, and the text of its older part
    (`ids[:read]`) is cut off. The text is the same whatever the pieces in which the ids come, and it is the rest
    of `tokenizer.decode(prompt + output)` after the prompt's text.

    Where byte tokens (<0x..>) that are no UTF-8 follow a character that was shown already, that character stays.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        tail = [token_id for token_id in prompt_token_ids[-4 * _TAIL_TOKENS :] if self._shows(token_id)]
        self._ids: list[int] = tail[-_TAIL_TOKENS:]
        self._read = len(self._ids)
        # A character that the prompt began belongs to the output that completes it.
        self._shown = self._decode(0).rstrip(_REPLACEMENT)

    def append(self, ids: Sequence[int]) -> str:
        """The text that `ids` add; characters not complete yet are held back."""
        return "".join([self._append_one(token_id) for token_id in ids])

    def finish(self) -> str:
        """What was held back, when no more ids come: incomplete characters as U+FFFD."""
        text = self._delta(self._decode(0)) if self._read < len(self._ids) else ""
        self._advance(len(self._ids))
        return text

    def _append_one(self, token_id: int) -> str:
        if not self._shows(token_id):
            return ""
        self._ids.append(token_id)
        text = self._decode(0)
        if text.endswith(_REPLACEMENT):
            held = len(self._ids) - self._read
            return self._cut(text) if held >= _MAX_HELD_TOKENS else ""
        if len(text) <= len(self._shown):
            return ""
        delta = self._delta(text)
        self._advance(len(self._ids))
        return delta

    def _cut(self, text: str) -> str:
        """Show what four bytes or more have followed, so that endless broken bytes do not make the window endless."""
        cut = len(self._ids) - 4
        tail = self._decode(cut)
        head = self._decode(0, cut)
        if head + tail != text or len(tail) < 4 or len(head) <= len(self._shown):
            return ""
        delta = self._delta(head)
        self._advance(cut)
        return delta

    def _delta(self, text: str) -> str:
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        return self._decode(self._read)

    def _advance(self, read: int) -> None:
        """Make the ids up to `read` the shown part of the window."""
        self._ids = self._ids[self._read :]
        self._read = read - self._read
        self._shown = self._decode(0, self._read)

    def _decode(self, start: int, end: int | None = None) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=False)

    def _shows(self, token_id: int) -> bool:
        """Whether a token reaches the decoder: neither a special one to skip nor padding of the vocabulary."""
        return token_id not in self._hidden and self._tokenizer.token(token_id) is not None
