"""Files that know a weight format or a model by name. A change to it, or a new one, may have to touch them.

A file mentions a weight format if it has the name as a part of an identifier (`linear_int8`, `Int8Linear`) or as a
string (`"int8"`, `"int8_128"`). It does not count if int8 or fp8 is something else: a dtype of an array library
(`torch.int8`), or the type of the KV cache (the statement or its function has "kv" in its name or text). Prose, such as
docstrings, help and messages, does not count either. Kernels do not count (Triton's, and those of a back end), but the
protocol that lists them counts.

A file mentions a model if it has the `model_type` as a string or imports the model's file. Files of other models do not
count, since they may build on it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.house.imports import PACKAGE, SOURCE, module_files, parse_file, runtime_imports
from scripts.house.machine import PROTOCOLS

FORMATS = ("int8_w8a16", "int8_fast", "int4_fast", "int8", "int4", "fp8")
"""Names that begin with those of others come first."""
_KERNELS = (f"{PACKAGE}.kernels", f"{PACKAGE}.runtime.machines")
_MODEL_ROOMS = (f"{PACKAGE}.models.families", f"{PACKAGE}.models")
_PLANNED_ROOM = f"{PACKAGE}.planner.models"
_ARRAYS = ("torch", "np", "numpy", "tl")


def format_mentions(source: Path = SOURCE) -> dict[str, list[str]]:
    """Format -> files that mention it, without the file of its own name. Paths are relative to src/."""
    found: dict[str, list[str]] = {name: [] for name in FORMATS}
    for module, path in module_files(source).items():
        if (module.startswith(_KERNELS) and module not in PROTOCOLS) or "kv" in path.stem:
            continue
        mentioned = set(_formats_in(parse_file(path), ""))
        for name in mentioned - {path.stem}:
            found[name].append(str(path.relative_to(source)))
    return found


def _formats_in(node: ast.AST, function: str) -> Iterator[str]:
    """The formats that the code below a node mentions. `function` is the name of the function around it."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield from _in_identifier(node.name)
        function = node.name
    elif isinstance(node, ast.stmt) and not hasattr(node, "body"):
        found = list(_formats_below(node, function))
        if found and "kv" not in ast.unparse(node).lower():
            yield from found
        return
    yield from _formats_below(node, function)


def _formats_below(node: ast.AST, function: str) -> Iterator[str]:
    if "kv" in function.lower():
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
        named = [name for name in FORMATS if node.value == name or node.value.startswith(f"{name}_")]
        yield from named[:1]
    for field in ("id", "attr", "arg", "name", "asname", "module"):
        value = getattr(node, field, None)
        if isinstance(value, str) and not _is_array_dtype(node):
            yield from _in_identifier(value)
    for child in ast.iter_child_nodes(node):
        yield from _formats_in(child, function)


def _is_array_dtype(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _ARRAYS


def _in_identifier(name: str) -> list[str]:
    found, rest = [], name.lower()
    if "8" not in rest and "4" not in rest:  # as most names
        return []
    for one in FORMATS:
        rest, count = re.subn(rf"(?<!u){one}(?!\d)", " ", rest)
        found += [one] * (count > 0)
    return found


def model_files(source: Path = SOURCE) -> dict[str, Path]:
    """`model_type` -> its file: a file in models/families/, or a file in models/ with both functions of a family.

    Files of models that only the planner knows, in planner/models/, are models too.
    """
    files = module_files(source)
    room = next(room for room in _MODEL_ROOMS if room in files)
    rooms = (room, _PLANNED_ROOM)
    inside = {name: path for name, path in files.items() if name.rpartition(".")[0] in rooms}
    if room == _MODEL_ROOMS[1]:
        inside = {name: path for name, path in inside.items() if _is_family(path)}
    return {path.stem: path for name, path in inside.items() if not path.stem.startswith("_")}


def _is_family(path: Path) -> bool:
    tree = parse_file(path)
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return names >= {"decoder_spec", "tensor_source"}


def model_mentions(source: Path = SOURCE) -> dict[str, list[str]]:
    """Model -> files that name it and belong to no model. Paths are relative to src/."""
    models = model_files(source)
    found: dict[str, list[str]] = {name: [] for name in models}
    for module, path in module_files(source).items():
        if path in models.values():
            continue
        tree = parse_file(path)
        strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        imported = {
            part
            for one in runtime_imports(tree, module, path.stem == "__init__")
            for part in (f"{one.target}.{one.name}", one.target)
        }
        for name, file in models.items():
            own = ".".join(file.relative_to(source).with_suffix("").parts)
            if name in strings or own in imported:
                found[name].append(str(path.relative_to(source)))
    return found
