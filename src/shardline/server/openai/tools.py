"""The tools that a request offers, and which of them an answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from shardline.server.errors import bad_request
from shardline.server.openai.protocol import refuse_if
from shardline.server.openai.request_model import RequestModel
from shardline.server.service import Service
from shardline.text.tool_parsers.base import ToolParser
from shardline.text.tool_parsers.call_rules import OfferedFunction

MAX_TOOLS = 1024

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class FunctionDefinition(RequestModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: FunctionDefinition


@dataclass(frozen=True)
class ToolUse:
    """What a request says about tools."""

    definitions: list[dict[str, Any]]
    """All tools, as chat templates take them."""
    callable: tuple[FunctionDefinition, ...]
    """The functions that the answer may call."""
    required: bool
    """Whether the answer must call one."""
    parallel: bool
    """Whether it may call more than one."""
    parser: type[ToolParser]

    @cached_property
    def offered(self) -> tuple[OfferedFunction, ...]:
        """The functions that the answer may call, as parsers and grammars take them."""
        return tuple(OfferedFunction(function.name, function.parameters) for function in self.callable)

    def make_parser(self) -> ToolParser:
        """A parser for one answer."""
        return self.parser(self.offered, parallel=self.parallel)


def choose_tools(
    service: Service, tools: Sequence[Tool], choice: str | dict[str, Any] | None, parallel: bool
) -> ToolUse | None:
    """What `tools` and `tool_choice` mean together. None: the answer may not call tools.

    Raises:
        ApiError: 400, they do not fit each other or the model.
    """
    functions = tuple(tool.function for tool in tools)
    _check_functions(functions)
    named = _named_function(choice, functions)
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise bad_request(
            f"Invalid value for 'tool_choice': '{choice}'; use 'none', 'auto', 'required' or a function.", "tool_choice"
        )
    if not functions:
        refuse_if(
            choice not in (None, "none", "auto"),
            "tool_choice",
            "'tool_choice' needs 'tools': offer a function to call.",
        )
        return None
    if choice == "none":
        return None
    template = service.chat.template
    refuse_if(
        template is not None and not template.takes_tools,
        "tools",
        "The model's chat template takes no tools: leave out 'tools', set 'tool_choice' to 'none', or start the server "
        "with a --chat-template that shows them to the model.",
    )
    parser = service.chat.tool_parser
    if parser is None:
        raise bad_request(
            "The form in which this model writes tool calls is not known: start the server with --tool-call-parser.",
            "tools",
            "unsupported_parameter",
        )
    return ToolUse(
        definitions=[tool.model_dump(exclude_none=True) for tool in tools],
        callable=functions if named is None else (named,),
        required=choice == "required" or named is not None,
        parallel=parallel and named is None,
        parser=parser,
    )


def _check_functions(functions: Sequence[FunctionDefinition]) -> None:
    names = set()
    for index, function in enumerate(functions):
        param = f"tools[{index}].function.name"
        if not _NAME.fullmatch(function.name):
            raise bad_request(
                f"Invalid value for '{param}': a name has 1 to 64 letters, digits, underscores, dots or dashes.", param
            )
        if function.name in names:
            raise bad_request(f"Invalid value for '{param}': there are two functions '{function.name}'.", param)
        names.add(function.name)


def _named_function(
    choice: str | dict[str, Any] | None, functions: Sequence[FunctionDefinition]
) -> FunctionDefinition | None:
    """The function that the answer must call. None: `choice` names none."""
    if not isinstance(choice, dict):
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise bad_request(
            "Invalid value for 'tool_choice': a function is chosen by "
            '{"type": "function", "function": {"name": "…"}}.',
            "tool_choice",
        )
    for function in functions:
        if function.name == name:
            return function
    raise bad_request(f"Invalid value for 'tool_choice': 'tools' has no function '{name}'.", "tool_choice")
