"""The imports between modules, and the modules that are in cycles."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent.parent / "src"
PACKAGE = "shardline"


@dataclass(frozen=True)
class Import:
    """One imported name at one line. `target` is a module; `name` is imported from it (None: the module itself)."""

    line: int
    target: str
    name: str | None
    is_lazy: bool
    """Whether the import is inside a function."""


def module_files(source: Path = SOURCE) -> dict[str, Path]:
    """The file of every module of the package, by dotted name."""
    files = {}
    for path in sorted((source / PACKAGE).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


@functools.cache
def parse_file(path: Path) -> ast.Module:
    """The tree of a file, kept because every figure reads all files."""
    return ast.parse(path.read_text())


def runtime_imports(tree: ast.Module, module: str, is_package: bool, with_types: bool = False) -> list[Import]:
    """The imports that run, at the top or in a function; `with_types`: also those under `if TYPE_CHECKING`."""
    found: list[Import] = []

    def visit(nodes: list[ast.stmt], is_lazy: bool) -> None:
        for node in nodes:
            if isinstance(node, ast.Import):
                found.extend(Import(node.lineno, alias.name, None, is_lazy) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                target = _absolute(node, module, is_package)
                found.extend(Import(node.lineno, target, alias.name, is_lazy) for alias in node.names)
            elif isinstance(node, ast.If) and _is_type_checking(node.test) and not with_types:
                visit(node.orelse, is_lazy)
            else:
                inner = is_lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                for block in _blocks(node):
                    visit(block, inner)

    visit(tree.body, False)
    return found


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        yield getattr(node, name, [])
    for handler in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
        yield handler.body


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    base = module.split(".")
    base = base[: len(base) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def import_graph(source: Path = SOURCE, with_types: bool = False) -> dict[str, set[str]]:
    """Module -> modules of the package that it imports by name, at any time; `with_types`: also for type checkers only.

    A package's `__init__` runs before its modules, but this is not an edge here: otherwise a package that imports its
    modules would be in a cycle with each of them. So the version, which the root package has, is no edge either.
    """
    files = module_files(source)
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        edges = set()
        for one in runtime_imports(parse_file(path), module, path.stem == "__init__", with_types):
            whole = f"{one.target}.{one.name}"
            target = whole if one.name and whole in files else one.target
            if target in files and target not in (module, PACKAGE):
                edges.add(target)
        graph[module] = edges
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of two modules or more (Tarjan's algorithm), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def connect(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(graph[module]):
            if target not in index:
                connect(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            start = stack.index(module)
            component = sorted(stack[start:])
            del stack[start:]
            if len(component) > 1:
                found.append(component)

    for module in sorted(graph):
        if module not in index:
            connect(module)
    return found
