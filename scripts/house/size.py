"""What has grown too large to be read at one sitting: files, functions and classes."""

from __future__ import annotations

import ast
from pathlib import Path

from scripts.house.imports import PACKAGE, SOURCE, parse_file


def long_files(most: int, source: Path = SOURCE) -> dict[str, int]:
    """Files with more lines than `most`, and their lines."""
    counts = {_name(path, source): len(path.read_text().splitlines()) for path in _files(source)}
    return {name: count for name, count in counts.items() if count > most}


def long_functions(most: int, source: Path = SOURCE) -> dict[str, int]:
    """Functions with more lines than `most` as "file:function", and their lines."""
    found = {}
    for path in _files(source):
        for node in ast.walk(parse_file(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count > most:
                    found[f"{_name(path, source)}:{node.name}"] = count
    return found


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


def _files(source: Path) -> list[Path]:
    return sorted((source / PACKAGE).rglob("*.py"))


def _name(path: Path, source: Path) -> str:
    return path.relative_to(source / PACKAGE).as_posix()
