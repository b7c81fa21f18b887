"""Rows of hidden states in messages, in place of texts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from shardline.api.prompt_embeds import Rows, join_parts
from shardline.messages.request import PromptEmbeds
from shardline.server.openai.chat.messages import ChatMessage, ContentPart
from shardline.server.prompts import read_embeds
from shardline.server.service import Service


async def take_embeds(
    service: Service, messages: Sequence[ChatMessage], param: str
) -> tuple[Sequence[ChatMessage], dict[str, Rows]]:
    """The messages with a text that nobody can guess in place of each `prompt_embeds`, and the rows of each text.

    `param`: the field of the request that had the messages.

    Raises:
        ApiError: 400, rows cannot be read, or the server takes none.
    """
    rows: dict[str, Rows] = {}

    async def take(part: ContentPart) -> ContentPart:
        if part.type != "prompt_embeds":
            return part
        assert part.data is not None
        gap = secrets.token_hex(16)
        rows[gap] = await read_embeds(service, part.data, param)
        return ContentPart(type="text", text=gap)

    taken = []
    for message in messages:
        if isinstance(message.content, list) and any(part.type == "prompt_embeds" for part in message.content):
            message = message.model_copy(update={"content": [await take(part) for part in message.content]})
        taken.append(message)
    return taken, rows


def fill_gaps(ids: Sequence[int], rows: Sequence[Rows]) -> tuple[list[int], PromptEmbeds | None]:
    """The prompt whose negative ids -1, -2 and so on stand for these rows."""
    return join_parts([rows[-1 - one] if one < 0 else [one] for one in ids])
