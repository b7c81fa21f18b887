"""Chat messages as templates expect them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardline.text.call_arguments import parsed_call

Message = Mapping[str, Any]


def normalize_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them: the content is a string, the arguments of a tool call are an object.

    Text parts are joined with newlines; a content of None becomes an empty string, which only an answer may have.

    Raises:
        ValueError: there are no messages, one has no role or no content, or a part is not text.
    """
    if not messages:
        raise ValueError("messages must not be empty")
    normal = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] must be an object with a role")
        if message.get("content") is None and message["role"] != "assistant":
            raise ValueError(f"messages[{index}] has no content: only those of the role 'assistant' may have none")
        copy = dict(message)
        copy["content"] = text_content(message.get("content"), index)
        if message.get("tool_calls"):
            copy["tool_calls"] = [parsed_call(call) for call in message["tool_calls"]]
        normal.append(copy)
    return normal


def text_content(content: Any, index: int) -> str:
    """The text of the content of message `index`.

    Raises:
        ValueError: it is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"messages[{index}].content must be text or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"messages[{index}].content has a part of type {kind!r}; this model takes text only")
        texts.append(part["text"])
    return "\n".join(texts)
