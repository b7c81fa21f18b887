"""The formats in which models write tool calls: one file each, found by its name."""

from __future__ import annotations

import importlib
import pkgutil
from typing import cast

from shardline.text.tool_parsers.base import ToolParser


def tool_parser_names() -> list[str]:
    """The names of all formats."""
    shared = ("base", "tagged")
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in shared)


def find_tool_parser(name: str) -> type[ToolParser]:
    """The parser of this format.

    Raises:
        ValueError: there is no such format.
    """
    if name not in tool_parser_names():
        raise ValueError(f"there is no tool call parser {name!r}; there are {', '.join(tool_parser_names())}")
    return cast("type[ToolParser]", importlib.import_module(f"{__name__}.{name}").Parser)


def guess_tool_parser(template: str) -> str | None:
    """The name of the format that a chat template shows to the model; None: it shows none that is known."""
    matches = [name for name in tool_parser_names() if all(mark in template for mark in _marks(name))]
    return max(matches, key=lambda name: len(_marks(name)), default=None)


def _marks(name: str) -> tuple[str, ...]:
    return find_tool_parser(name).template_marks
