"""Log probabilities in OpenAI's two shapes, with token texts that survive half a character."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardline.text.tokenizer import Tokenizer
from shardline.types import TokenLogprobs

_LOWEST = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot say."""


class TokenPiece(msgspec.Struct, frozen=True):
    """What one token stands for."""

    text: str
    """Its text; for bytes that are no whole character, `bytes:` and their escapes, as OpenAI writes them."""
    bytes: list[int]
    num_chars: int
    """Characters that begin in it."""


class TokenPieces:
    """The pieces of a tokenizer's tokens, by id."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, TokenPiece] = {}

    def __getitem__(self, token_id: int) -> TokenPiece:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make(token_id)
        return piece

    def _make(self, token_id: int) -> TokenPiece:
        if self._tokenizer is None:
            return TokenPiece(f"token_id:{token_id}", [], 0)
        raw = self._tokenizer.token_bytes(token_id)
        # A continuation byte (10xxxxxx) belongs to a character that began earlier.
        num_chars = sum(byte & 0xC0 != 0x80 for byte in raw)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return TokenPiece(text, list(raw), num_chars)


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens at a place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """The chosen token at a place, and its rivals."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The `logprobs` of a chat choice."""

    content: list[ChatLogprob]
    refusal: None = None


def chat_logprobs(pieces: TokenPieces, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Log probabilities in the shape of chat completions."""
    content = []
    for token_id, chosen in zip(token_ids, logprobs, strict=True):
        piece = pieces[token_id]
        top = [
            TopLogprob(pieces[i].text, max(value, _LOWEST), pieces[i].bytes)
            for i, value in zip(chosen.top_ids, chosen.top_logprobs, strict=True)
        ]
        content.append(ChatLogprob(piece.text, max(chosen.logprob, _LOWEST), piece.bytes, top))
    return ChatLogprobs(content)


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The `logprobs` of a completion choice: four lists, one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionLogprobsWriter:
    """Writes the logprobs of one choice piece by piece.

    Args:
        offset: characters of the text before the first token: those of an echoed prompt.
    """

    def __init__(self, pieces: TokenPieces, offset: int = 0) -> None:
        self._pieces = pieces
        self._offset = offset

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """The next tokens, in the shape of completions. The chosen token is always among the top ones."""
        written = CompletionLogprobs([], [], [], [])
        for token_id, chosen in zip(token_ids, logprobs, strict=True):
            piece = self._pieces[token_id]
            logprob = max(chosen.logprob, _LOWEST)
            top: dict[str, float] = {}
            for i, value in zip(chosen.top_ids, chosen.top_logprobs, strict=True):
                # Two ids may share a text; the more likely one, which comes first, keeps it.
                top.setdefault(self._pieces[i].text, max(value, _LOWEST))
            top.setdefault(piece.text, logprob)
            continues = bool(piece.bytes) and piece.bytes[0] & 0xC0 == 0x80
            written.text_offset.append(self._offset - 1 if continues and self._offset else self._offset)
            written.token_logprobs.append(logprob)
            written.tokens.append(piece.text)
            written.top_logprobs.append(top)
            self._offset += piece.num_chars
        return written
