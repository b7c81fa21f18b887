"""Custom tools take any text. A model writes it like the one argument of a function: `{"input": "…"}`."""

from __future__ import annotations

import json
import re
from typing import Any

INPUT_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input of the tool, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HEX = r"[\da-fA-F]"
_LOW = rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
_TEXT = re.compile(
    rf"""(?: [^"\\]+
    | \\u[dD][89abAB]{_HEX}{{2}}(?: {_LOW} | (?=[^\\] | \\[^u] | \\u(?![dD][c-fC-F]){_HEX}{{4}}) )
    | \\u(?![dD][89abAB]){_HEX}{{4}}
    | \\[^u]
    )*""",
    re.VERBOSE,
)
"""Characters and escapes that are whole. Two escapes that are one pair of surrogates belong together."""


class CustomInput:
    """Decodes the arguments of one call as they arrive. What is no such JSON stays as it is."""

    def __init__(self) -> None:
        self._held = ""
        self._state = "begins"

    def add_json(self, part: str) -> str:
        """The text that the next part adds."""
        self._held += part
        if self._state == "begins":
            match = _BEGIN.match(self._held)
            if match is not None:
                self._held = self._held[match.end() :]
                self._state = "text"
            elif not '{"input":"'.startswith(re.sub(r"\s", "", self._held)):
                self._state = "other"
        text = ""
        if self._state == "text":
            match = _TEXT.match(self._held)
            assert match is not None
            text, self._held = _decode(match[0]), self._held[match.end() :]
            self._state = "over" if self._held.startswith('"') else "text"
        elif self._state == "other":
            text, self._held = self._held, ""
        return text


def _decode(escaped: str) -> str:
    known = re.sub(r'\\([^"\\/bfnrtu])', r"\\\\\1", re.sub(r"\\\\", r"\\u005c", escaped))
    text: str = json.loads(f'"{known}"', strict=False)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def write_input(text: str) -> str:
    """The arguments of a call with this input."""
    return json.dumps({"input": text}, ensure_ascii=False)
