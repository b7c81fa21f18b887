"""The formats in which models write reasoning before their answer: one file each, found by its name."""

from __future__ import annotations

import importlib
import pkgutil
from typing import cast

from shardline.text.reasoning_parsers.base import ReasoningParser


def reasoning_parser_names() -> list[str]:
    """The names of all formats."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in ("base", "enclosed"))


def find_reasoning_parser(name: str) -> type[ReasoningParser]:
    """The parser of this format, which may have other names.

    Raises:
        ValueError: there is no such format.
    """
    names = reasoning_parser_names()
    if name in names:
        return _load(name)
    parsers = [_load(known) for known in names]
    for parser in parsers:
        if name in parser.other_names:
            return parser
    others = sorted(other for parser in parsers for other in parser.other_names)
    raise ValueError(
        f"there is no reasoning parser {name!r}; there are {', '.join(names)}, and of the same formats as some of "
        f"these {', '.join(others)}"
    )


def _load(name: str) -> type[ReasoningParser]:
    return cast("type[ReasoningParser]", importlib.import_module(f"{__name__}.{name}").Parser)


def guess_reasoning_parser(template: str) -> str | None:
    """The format without which the answers to a chat template cannot be read. None: it needs none."""
    for name in reasoning_parser_names():
        marks = find_reasoning_parser(name).template_marks
        if marks and all(mark in template for mark in marks):
            return name
    return None
