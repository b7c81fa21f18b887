"""The formats in which models write reasoning before their answer: one file each, found by its name."""

from __future__ import annotations

from shardline.text.formats import Formats
from shardline.text.reasoning_parsers.base import ReasoningParser

_FORMATS = Formats[ReasoningParser](__name__, __path__, "reasoning parser", ("base", "enclosed"))
reasoning_parser_names, find_reasoning_parser = _FORMATS.names, _FORMATS.find


def guess_reasoning_parser(template: str) -> str | None:
    """The format without which the answers to a chat template cannot be read. None: it needs none."""
    return next(iter(_FORMATS.shown_by(template)), None)
