"""The jobs in which chats go to a template's process.

A job is the JSON of `Compile` or `Render`. The answer to the first one is the JSON of `Compiled`. The answer to the
second one is one character and a text: `RENDERED` and the prompt, or `REFUSED` and why there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

MAX_RENDERED_CHARS = 16_000_000
RENDERED, REFUSED = b"t", b"r"


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


JOB_ENCODER = msgspec.json.Encoder(enc_hook=_as_json)
"""Encodes the body of a job.

Raises:
    TypeError: something in it is not JSON.
    ValueError: a text in it is not Unicode.
    RecursionError: it is nested too deeply.
"""
