"""The arguments of tool calls in messages, as chat templates expect them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

MAX_ARGUMENT_CHARS = 4 << 20
MAX_ARGUMENT_VALUES = 131_072
"""The most values in the arguments of one tool call."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parsed_call(call: Any) -> Any:
    """The call with its arguments as an object, which templates print; OpenAI sends them as a JSON string.

    Raises:
        ValueError: they are too long.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"]
    # A comma or bracket precedes each value, and nothing else runs while the text is parsed.
    num_values = text.count(",") + text.count("[") + text.count("{")
    if len(text) > MAX_ARGUMENT_CHARS or num_values > MAX_ARGUMENT_VALUES:
        raise ValueError(
            f"the arguments of a tool call have more than {MAX_ARGUMENT_CHARS} characters or {MAX_ARGUMENT_VALUES} "
            "commas and brackets"
        )
    try:
        arguments = json.loads(text or "{}")
        if _SURROGATE.search(text):
            json.dumps(arguments, ensure_ascii=False).encode()  # half of a pair cannot be encoded
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
