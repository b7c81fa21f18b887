"""The formats in which models write tool calls: one file each, found by its name."""

from __future__ import annotations

import importlib
import pkgutil
from typing import cast

from shardline.text.tool_parsers.base import ToolParser


def tool_parser_names() -> list[str]:
    """The names of all formats."""
    shared = ("base", "json_lists", "literals", "tagged")
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in shared)


def find_tool_parser(name: str) -> type[ToolParser]:
    """The parser of this format, which may have other names.

    Raises:
        ValueError: there is no such format.
    """
    names = tool_parser_names()
    if name in names:
        return _load(name)
    parsers = [_load(known) for known in names]
    for parser in parsers:
        if name in parser.other_names:
            return parser
    others = sorted(other for parser in parsers for other in parser.other_names)
    raise ValueError(
        f"there is no tool call parser {name!r}; there are {', '.join(names)}, and of the same formats as some of "
        f"these {', '.join(others)}"
    )


def _load(name: str) -> type[ToolParser]:
    return cast("type[ToolParser]", importlib.import_module(f"{__name__}.{name}").Parser)


def guess_tool_parser(template: str) -> str | None:
    """The name of the format that a chat template shows to the model; None: it shows none that is known."""
    matches = [name for name in tool_parser_names() if all(mark in template for mark in _marks(name))]
    return max(matches, key=lambda name: len(_marks(name)), default=None)


def _marks(name: str) -> tuple[str, ...]:
    return find_tool_parser(name).template_marks
