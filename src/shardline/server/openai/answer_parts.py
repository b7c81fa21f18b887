"""What chats, completions and responses have in common in their answers: the usage, and log probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardline.api.outputs import RequestOutput
from shardline.messages.request import TokenLogprobs
from shardline.server.errors import bad_request
from shardline.server.service import Service
from shardline.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""OpenAI's value for minus infinity, which JSON does not have."""


class TokenPiece(msgspec.Struct, frozen=True):
    """The text and the bytes of one token."""

    text: str
    """Its text. If its bytes are not whole characters: `bytes:` and their escapes, as OpenAI writes them."""
    bytes: list[int]
    num_chars: int
    """Number of characters that begin in it."""


class TokenPieces:
    """The TokenPiece of each token id, made when it is first used. Without a tokenizer, its text is token_id:N."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        """`as_ids`: texts are token_id:N, although there is a tokenizer."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._pieces: dict[int, TokenPiece] = {}

    def __getitem__(self, token_id: int) -> TokenPiece:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def _make_piece(self, token_id: int) -> TokenPiece:
        if self._tokenizer is None:
            return TokenPiece(f"token_id:{token_id}", [], 0)
        raw = self._tokenizer.token_bytes(token_id)
        as_id = f"token_id:{token_id}" if self._as_ids else ""
        # A continuation byte (10xxxxxx) belongs to a character that began before it.
        num_chars = sum(byte & 0xC0 != 0x80 for byte in raw)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return TokenPiece(as_id or text, list(raw), num_chars)


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """The chosen token at a position, and the most likely ones."""

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
            TopLogprob(pieces[i].text, max(value, LOWEST_LOGPROB), pieces[i].bytes)
            for i, value in zip(chosen.top_ids, chosen.top_logprobs, strict=True)
        ]
        content.append(ChatLogprob(piece.text, max(chosen.logprob, LOWEST_LOGPROB), piece.bytes, top))
    return ChatLogprobs(content)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """How many completion tokens are reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Number of tokens of one API request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


def usage_of(outputs: Sequence[RequestOutput], reasoning_tokens: int | None = None) -> Usage:
    """The usage so far. A prompt counts once, even if it has several choices.

    `reasoning_tokens`: how many of the generated tokens are reasoning; None: that is not known.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    details = msgspec.UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens)
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached), details)


def check_top_logprobs(service: Service, count: int) -> None:
    """Refuse a `top_logprobs` that the engine was not started for.

    Raises:
        ApiError: 400.
    """
    try:
        service.llm.model.builder.logprob_counts.count("top_logprobs", count)
    except ValueError as error:
        raise bad_request(str(error), "top_logprobs") from error
