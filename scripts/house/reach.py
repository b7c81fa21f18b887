"""How far a capability reaches: the files that mention it and are not its own.

docs/architecture.md lists capabilities in a table: name, its own files and folders, words, most files. A file mentions
a capability if a part of an identifier, or of a string without spaces, is one of the words. Prose does not count.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from scripts.house.imports import PACKAGE, SOURCE, module_files, parse_file

ARCHITECTURE = SOURCE.parent / "docs/architecture.md"
_HEADING = "## Reach of a capability"


@dataclass(frozen=True)
class Capability:
    """A row of the table. Paths are relative to src/shardline; `words` are regular expressions."""

    name: str
    own: tuple[str, ...]
    words: tuple[str, ...]
    most_files: int


def capabilities(document: Path = ARCHITECTURE) -> list[Capability]:
    """The rows of the table in docs/architecture.md."""
    section = document.read_text().partition(_HEADING)[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    return [
        Capability(name.strip(), tuple(re.findall("`(.+?)`", own)), tuple(re.findall("`(.+?)`", words)), int(most))
        for name, own, words, most in rows
    ]


def mentioning_files(capability: Capability, source: Path = SOURCE) -> list[str]:
    """Files besides its own that mention a capability."""
    pattern = re.compile("|".join(capability.words), re.IGNORECASE)
    found = []
    for path in module_files(source).values():
        name = path.relative_to(source / PACKAGE).as_posix()
        if not name.startswith(capability.own) and any(map(pattern.search, _words(path))):
            found.append(name)
    return found


@functools.cache
def _words(path: Path) -> set[str]:
    words: set[str] = set()
    for node in ast.walk(parse_file(path)):
        values = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname", "module")]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            values.append(node.value)
        words.update(value for value in values if isinstance(value, str))
    return words
