"""The tools that a chat offers, and what a request means by them."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pydantic import ConfigDict

from shardline.server.errors import bad_request
from shardline.server.json_body import RequestModel
from shardline.server.openai.chat.custom_tools import allowed_tools
from shardline.server.openai.protocol import refuse_if
from shardline.server.service import Service
from shardline.text.tool_parsers import find_tool_parser
from shardline.text.tool_parsers.base import OfferedFunction, ToolParser

logger = logging.getLogger(__name__)

MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FORCED_FORMAT = "llama3_json"
"""JSON that a grammar enforces: any model can write it."""


class FunctionDefinition(RequestModel):
    """A function that the model may call; `parameters` is a JSON schema. Unknown fields are ignored, as in vLLM."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool: a function, or one that stands for a custom tool. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    type: Literal["function", "custom"] = "function"
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates get it in vLLM: null where nothing is said, but for `strict`."""
        function = self.function.model_dump(exclude={"strict"} if self.function.strict is None else None)
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """Which functions an answer may call, and how."""

    callable: tuple[FunctionDefinition, ...]
    """The functions that the answer may call."""
    required: bool
    """Whether the answer must call one."""
    parallel: bool
    """Whether it may call more than one."""
    parser: type[ToolParser]
    is_named: bool = False
    """Whether the request names the function to call."""
    custom: frozenset[str] = frozenset()
    """The names of those that stand for custom tools."""

    @cached_property
    def offered(self) -> tuple[OfferedFunction, ...]:
        """The functions that the answer may call, as the parsers of answers take them."""
        return tuple(OfferedFunction(one.name, one.parameters, one.name in self.custom) for one in self.callable)

    def make_parser(self) -> ToolParser:
        """A parser for one answer."""
        return self.parser(self.offered, parallel=self.parallel)


def choose_tools(
    service: Service, tools: Sequence[Tool], choice: str | dict[str, Any] | None, parallel: bool
) -> ToolUse | None:
    """What `tools` and `tool_choice` mean together. None: the answer may not call tools.

    The chat template may show no tools to the model; the start of the server warns of that. If it is not known how the
    model writes calls, an answer calls functions only if it must.

    Raises:
        ApiError: 400, they do not fit each other or the model.
    """
    functions = tuple(tool.function for tool in tools)
    _check_functions(functions)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = allowed_tools(choice, lambda one: _named_function(one, functions), MAX_TOOLS)
        names = {one.name for one in allowed}
        functions = tuple(one for one in functions if one.name in names)
    named = _named_function(choice, functions) if isinstance(choice, dict) else None
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
    required = choice == "required" or named is not None
    parser = service.chat.tool_parser
    if parser is None:
        _warn_of_unknown_format()
        if not required:
            return None
        parser = find_tool_parser(_FORCED_FORMAT)
    return ToolUse(
        callable=functions if named is None else (named,),
        required=required,
        parallel=parallel and named is None,
        parser=parser,
        is_named=named is not None,
        custom=frozenset(tool.function.name for tool in tools if tool.type == "custom"),
    )


@functools.cache
def _warn_of_unknown_format() -> None:
    logger.warning(
        "a request offers tools, but how this model writes calls is not known, so its answers have none unless a "
        "request forces them; name the format by --tool-call-parser"
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


def _named_function(choice: Any, functions: Sequence[FunctionDefinition]) -> FunctionDefinition:
    """The function, or custom tool, that an object names."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    definition = choice.get(kind) if kind in ("function", "custom") else None
    name = definition.get("name") if isinstance(definition, dict) else None
    if not isinstance(name, str):
        raise bad_request(
            "Invalid value for 'tool_choice': a function is chosen by "
            '{"type": "function", "function": {"name": "…"}}, and a custom tool by the same with "custom".',
            "tool_choice",
        )
    for function in functions:
        if function.name == name:
            return function
    raise bad_request(f"Invalid value for 'tool_choice': 'tools' has no function '{name}'.", "tool_choice")
