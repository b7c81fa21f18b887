"""Places that depend on the machine: code outside the back ends that asks on which machine it runs.

A place is a line of a file outside `ROOMS`. Places are found by what the code does, not by today's names:

- compare: a comparison with the name of a kind of device (`x.device.type == "cpu"`, `kind in ("cuda", "hip")`, a
  `case`, a dict with such keys, `.startswith("cuda")`), or with a module of kernels (`kernels(x) is not _cpu`);
- ask: a predicate whose name ends in a machine (`device.is_host`, `are_few_on_gpu(x)`, `x.is_cuda`), if it is used or
  is a function's parameter;
- kernels: an import of one back end's code (Triton, or a module of a back end) instead of the protocol.

A second list, `library_uses`, has the lines that use a machine's own library: imports of the compiled kernels `_cpu`,
`torch.cuda` and `torch.backends.cuda`, `platform` and `sys.platform`. Such a line need not ask anything, but code that
is independent of the machine has none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts.house.imports import PACKAGE, SOURCE, module_files, parse_file, runtime_imports

_BACK_ENDS = (f"{PACKAGE}.kernels", f"{PACKAGE}.runtime.machines")
ROOMS = (*_BACK_ENDS, f"{PACKAGE}.deployment")
"""Packages and modules that may know the machine. Some of them exist only in other states of the tree."""

PROTOCOLS = tuple(
    f"{PACKAGE}.{name}"
    for name in (
        "kernels",
        "kernels.block_copies",
        "kernels.contract",
        "kernels.low_rank",
        "kernels.memory",
        "kernels.page_cache",
        "kernels.pages",
        "kernels.tensors",
        "kernels.unpack",
        "runtime.machines",
        "runtime.machines.base",
    )
)
"""Modules of `ROOMS` that other modules may import."""

COMPILED = f"{PACKAGE}._cpu"
KINDS = frozenset({"cpu", "cuda", "gpu", "host", "mps", "xpu", "hip", "rocm"})
_PREDICATE = re.compile(
    r"^_?(?:\w+_)?(?:is|are|on|has|have|owns|in|needs|runs)_(?:\w+_)?(?:host|gpus?|cuda|cpu|triton)$"
)
_LIBRARIES = ("torch.cuda.", "torch.backends.cuda.", "sys.platform", "platform.")


@dataclass(frozen=True, order=True)
class Place:
    """One line. `rules` are the names of the rules that found it."""

    file: str
    """Path relative to src/."""
    line: int
    rules: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({', '.join(self.rules)})"


def machine_places(source: Path = SOURCE) -> list[Place]:
    """All places that depend on the machine."""
    return _places(source, _asks)


def library_uses(source: Path = SOURCE) -> list[Place]:
    """All lines that use a machine's own library."""
    return _places(source, _uses)


Find = Callable[[ast.Module, list[tuple[int, str, str]], frozenset[str]], list[tuple[int, str]]]
"""A tree, its imports (line, module, module with the name taken from it) and all modules -> lines and rules."""


def _places(source: Path, find: Find) -> list[Place]:
    places = []
    files = module_files(source)
    for module, path in files.items():
        if _is_in(module, ROOMS):
            continue
        rules: dict[int, set[str]] = {}
        tree = parse_file(path)
        imports = [
            (one.line, one.target, f"{one.target}.{one.name}" if one.name else one.target)
            for one in runtime_imports(tree, module, path.stem == "__init__")
        ]
        for line, rule in find(tree, imports, frozenset(files)):
            rules.setdefault(line, set()).add(rule)
        file = str(path.relative_to(source))
        places += [Place(file, line, tuple(sorted(found))) for line, found in sorted(rules.items())]
    return places


def _is_in(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def _asks(tree: ast.Module, imports: list[tuple[int, str, str]], modules: frozenset[str]) -> list[tuple[int, str]]:
    found = []
    kernel_modules = set()
    for line, target, whole in imports:
        if whole == COMPILED:
            kernel_modules.add("_cpu")
        elif target.split(".")[0] == "triton" or _is_back_end(target, whole, modules):
            found.append((line, "kernels"))
            kernel_modules.add(whole.rpartition(".")[2])
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [side for operand in (node.left, *node.comparators) for side in _elements(operand)]
            identity = any(isinstance(side, ast.Name) and side.id in kernel_modules for side in sides)
            if identity or any(_is_kind(side) for side in sides):
                found.append((node.lineno, "compare"))
        elif isinstance(node, ast.Dict):
            found += [(key.lineno, "compare") for key in node.keys if key is not None and _is_kind(key)]
        elif isinstance(node, ast.MatchValue) and _is_kind(node.value):
            found.append((node.lineno, "compare"))
        elif isinstance(node, (ast.Attribute, ast.arg)):
            name = node.attr if isinstance(node, ast.Attribute) else node.arg
            found += [(node.lineno, "ask")] if _PREDICATE.match(name) else []
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and _PREDICATE.match(called.id):
                found.append((node.lineno, "ask"))
            if isinstance(called, ast.Attribute) and called.attr == "startswith" and any(map(_is_kind, node.args)):
                found.append((node.lineno, "compare"))
    return found


def _is_back_end(target: str, whole: str, modules: frozenset[str]) -> bool:
    """Whether an import takes something of one back end that is not in the protocol."""
    if not _is_in(whole, _BACK_ENDS) or whole in PROTOCOLS:
        return False
    # A name in the protocol's modules is part of the protocol, unless it is a module or package below them.
    return target not in PROTOCOLS or whole in modules


def _elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]


def _is_kind(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.partition(":")[0] in KINDS


def _uses(tree: ast.Module, imports: list[tuple[int, str, str]], modules: frozenset[str]) -> list[tuple[int, str]]:
    found = []
    for line, _, whole in imports:
        if _is_in(whole, (COMPILED,)):
            found.append((line, "_cpu"))
        elif _is_in(whole, ("torch.cuda", "torch.backends.cuda")):
            found.append((line, "torch.cuda"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            for library in _LIBRARIES:
                if f"{text}.".startswith(library) and text != "torch.cuda":
                    found.append((node.lineno, library.rstrip(".")))
    return found
