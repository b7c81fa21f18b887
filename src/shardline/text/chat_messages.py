"""Chat messages as templates expect them, and the jobs in which they go to a template's process.

A job is the JSON of `Compile` or `Render`. The answer to the first one is the JSON of `Compiled`. The answer to the
second one is one character and a text: `RENDERED` and the prompt, or `REFUSED` and why there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shardline.text.call_arguments import parsed_call

Message = Mapping[str, Any]
MAX_RENDERED_CHARS = 16_000_000
RENDERED, REFUSED = b"t", b"r"


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


class Compile(msgspec.Struct, tag="compile"):
    """Compile the templates that later jobs use."""

    sources: dict[str, str]


class Compiled(msgspec.Struct):
    """Whether the templates show tools to the model, and why they cannot be compiled (empty: they were)."""

    takes_tools: bool = False
    error: str = ""


class Render(msgspec.Struct, tag="render"):
    """Render a conversation with the template `name`, or with `source` if there is one."""

    name: str
    messages: Any
    """OpenAI chat messages."""
    variables: dict[str, Any]
    max_chars: int
    source: str | None = None
    """A template of this conversation's own."""
    as_parts: bool = False
    """Show contents to the template as lists of one text part."""


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


_ENCODER = msgspec.json.Encoder(enc_hook=_as_json)


def encode_job(job: Compile | Render) -> bytes:
    """The body of a job.

    Raises:
        TypeError: something in it is not JSON.
        ValueError: a text in it is not Unicode.
        RecursionError: it is nested too deeply.
    """
    return _ENCODER.encode(job)
