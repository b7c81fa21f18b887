"""Prompts that are no conversations: texts, token ids, and rows of hidden states that clients send."""

from __future__ import annotations

import asyncio

from shardline.api.prompt_embeds import Rows, decode_rows
from shardline.server.errors import bad_request
from shardline.server.service import Service

_MAX_ENCODED = 65_536
"""Texts of so many tokens are tokenized, and so many tokens decoded, even if the model takes less."""


def most_encoded(service: Service) -> int:
    """The most tokens of a text that is encoded although it is no whole prompt, and the most that are decoded."""
    return max(_MAX_ENCODED, 4 * service.llm.model.max_model_len)


async def encode_text(
    service: Service, text: str, add_special_tokens: bool, *, max_tokens: int | None = None
) -> list[int]:
    """The token ids of a prompt; `max_tokens`: see `ConversationFields.encode_messages`.

    Raises:
        ApiError: 400, it is certainly longer than the model supports, or the model has no tokenizer.
    """
    tokenizer = service.require_tokenizer()
    limit = service.llm.model.max_model_len if max_tokens is None else max_tokens
    if len(text) > limit and await asyncio.to_thread(tokenizer.exceeds, text, limit):
        raise service.too_long(f"The prompt has {len(text)} characters, which are more than {limit} tokens.", "prompt")
    return await tokenizer.encode_text_async(text, add_special_tokens)


def decode_tokens(service: Service, token_ids: list[int]) -> str:
    """The text of `token_ids`, special tokens included.

    Raises:
        ApiError: 400, a number is not a token id, or the model has no tokenizer.
    """
    try:
        return service.require_tokenizer().decode(token_ids, skip_special_tokens=False)
    except OverflowError as error:
        raise bad_request("Token ids must not be negative or larger than 32 bits.") from error


async def read_embeds(service: Service, data: str, param: str = "prompt_embeds") -> Rows:
    """The rows of hidden states that a client sends as base64.

    Raises:
        ApiError: 400, they cannot be read, or the server takes none.
    """
    builder = service.llm.model.builder
    try:
        return await asyncio.to_thread(decode_rows, data, builder.embeds_size, enabled=builder.takes_embeds)
    except ValueError as error:
        raise bad_request(str(error), param) from error
