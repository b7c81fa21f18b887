"""The formats in which models write tool calls: one file each, found by its name."""

from __future__ import annotations

from shardline.text.formats import Formats
from shardline.text.tool_parsers.base import ToolParser

_SHARED = ("base", "json_lists", "literals", "tagged")
_FORMATS = Formats[ToolParser](__name__, __path__, "tool call parser", _SHARED)
tool_parser_names, find_tool_parser = _FORMATS.names, _FORMATS.find


def guess_tool_parser(template: str) -> str | None:
    """The name of the format that a chat template shows to the model; None: it shows none that is known."""
    shown = _FORMATS.shown_by(template)
    return max(shown, key=shown.__getitem__, default=None)
