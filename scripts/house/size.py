"""How large the tree is, and what in it is too large to be read at one sitting, or too small to be a file."""

from __future__ import annotations

import ast
from pathlib import Path

from scripts.house.imports import PACKAGE, SOURCE, parse_file

_PECULIAR = ("models/families/", "text/reasoning_parsers/", "text/tool_parsers/")


def tree_size(source: Path = SOURCE) -> tuple[int, int]:
    """Files, and their lines."""
    counts = line_counts(source)
    return len(counts), sum(counts.values())


def line_counts(source: Path = SOURCE) -> dict[str, int]:
    """Lines of every file."""
    return {_name(path, source): len(path.read_text().splitlines()) for path in _files(source)}


def short_files(fewest: int, source: Path = SOURCE) -> list[str]:
    """Files with fewer lines than `fewest`. Families of models and formats of answers state only what is peculiar to
    one, and do not count, and neither does what only makes a folder a package."""
    found = {_name(path, source): path for path in _files(source) if len(path.read_text().splitlines()) < fewest}
    return [name for name, path in found.items() if not name.startswith(_PECULIAR) and not _is_marker(path)]


def long_files(most: int, source: Path = SOURCE) -> dict[str, int]:
    """Files with more lines than `most`, and their lines."""
    return {name: count for name, count in line_counts(source).items() if count > most}


def wide_classes(most: int, source: Path = SOURCE) -> dict[str, int]:
    """Classes with more methods than `most` as "file:class", and their methods; inherited ones do not count."""
    found = {}
    for path in _files(source):
        for node in ast.walk(parse_file(path)):
            if isinstance(node, ast.ClassDef):
                count = sum(isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)) for part in node.body)
                if count > most:
                    found[f"{_name(path, source)}:{node.name}"] = count
    return found


def _is_marker(path: Path) -> bool:
    return path.name == "__init__.py" and all(isinstance(node, ast.Expr) for node in parse_file(path).body)


def _files(source: Path) -> list[Path]:
    return sorted((source / PACKAGE).rglob("*.py"))


def _name(path: Path, source: Path) -> str:
    return path.relative_to(source / PACKAGE).as_posix()
