"""Custom tools, which take any text, and choices among several tools, as OpenAI has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shardline.server.errors import bad_request
from shardline.text.custom_input import INPUT_PARAMETERS, write_input

F = TypeVar("F")


def as_function(tool: Any) -> Any:
    """A tool of a request; a custom one with the function that the model sees.

    Raises:
        ValueError: its definition is missing, or has a grammar.
    """
    if not isinstance(tool, dict) or tool.get("type") != "custom":
        return tool
    custom = tool.get("custom")
    if not isinstance(custom, dict):
        raise ValueError("a tool of the type 'custom' has its definition in 'custom'")
    form = custom.get("format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise ValueError("the 'format' of a custom tool can only be text; offer a function with a JSON schema instead")
    function = {"name": custom.get("name"), "description": custom.get("description"), "parameters": INPUT_PARAMETERS}
    return {"type": "custom", "function": function}


def as_function_calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a message, with those of custom tools as chat templates know them."""
    return [_as_function_call(call) for call in calls]


def _as_function_call(call: dict[str, Any]) -> dict[str, Any]:
    custom = call.get("custom")
    if not isinstance(custom, dict) or not isinstance(custom.get("input"), str):
        return call
    function = {"name": custom.get("name"), "arguments": write_input(custom["input"])}
    return {"id": call.get("id"), "type": "function", "function": function}


def allowed_tools(choice: Any, find: Callable[[Any], F], most: int) -> tuple[str, tuple[F, ...]]:
    """The mode of a choice among several tools, and what `find` makes of them; `most`: that many are taken.

    Raises:
        ApiError: 400, it has no mode, or no tools.
    """
    allowed = choice.get("allowed_tools")
    mode, tools = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not 0 < len(tools) <= most:
        raise bad_request(
            "Invalid value for 'tool_choice.allowed_tools': it has a 'mode', 'auto' or 'required', and 'tools', "
            f"1 to {most} of them.",
            "tool_choice.allowed_tools",
        )
    return mode, tuple(map(find, tools))
