"""Extract the demo model's facts from the docstrings of Python's standard library.

Writes `dataset.jsonl`, one JSON object per line: `name` (dotted), `kind` (`module`, `class` or `function`)
and `answer` (the docstring's summary, cleaned). What docstrings say depends on the Python version, so the
file is kept in the repository and training reads nothing else. Python 3.11 reproduces it.
"""

from __future__ import annotations

import argparse
import builtins
import importlib
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

HERE = Path(__file__).parent

MAX_WORDS = 24
"""The summary keeps whole sentences up to this many words."""
MAX_FIRST_SENTENCE_WORDS = 34
"""A longer first sentence is not worth memorising, so the name is left out."""

SIGNATURE = re.compile(
    r"^[\w.]+\(.*?\)\s*(?:-+>|=>)\s*[^.\n]*?(?:\.\s+|\s--\s+|$)"  # f(x) -> value. Summary
    r"|^[\w.]+\([^)]*\)(?:\s+--\s+|$)"  # f(x) -- summary
)
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<!vs\.)\s+(?=[A-Z`'\"])")
ROLE = re.compile(r":\w+:`~?([^`]+)`")
"""Sphinx cross-references such as :class:`~os.PathLike`."""
NOT_PROSE = re.compile(
    r">>>|===|---|->|<==>|~~|::|https?:|@|\\|\.\.\.|Copyright|See help\(|^Return self\.|^An enumeration"
    r"|^Alias|^Usage:|^[\w.]+\(.*\)\W*$"
)


class Fact(NamedTuple):
    name: str
    kind: str
    answer: str


class Candidate(NamedTuple):
    name: str
    kind: str
    doc: str | None


def summary(doc: str, name: str) -> str | None:
    """The first sentences of a docstring as one line of plain text; None if no sentence makes sense alone."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc))[:3]:
        lines = [SIGNATURE.sub("", line.strip()).strip() for line in paragraph.splitlines()]
        text = re.sub(r"\s+", " ", " ".join(line for line in lines if line))
        text = ROLE.sub(r"\1", text).replace("``", "`")
        # Module docstrings often begin with their own name.
        text = re.sub(rf"(?i)^(?:Module )?{re.escape(name)}(?:\.py)?\s*(?:--|-|:)\s*", "", text)
        if text.isascii() and len(text.split()) >= 2:
            shortened = shorten(text)
            if shortened and not NOT_PROSE.search(shortened):
                return shortened
    return None


def shorten(text: str) -> str | None:
    """Whole sentences up to MAX_WORDS words, at least one; None if the first one is too long."""
    first, *others = SENTENCE_END.split(text)
    if len(first.split()) > MAX_FIRST_SENTENCE_WORDS or first.endswith(":"):
        return None
    kept = first
    for sentence in others:
        if len(kept.split()) + len(sentence.split()) > MAX_WORDS or sentence[-1] not in ".!)":
            break
        kept += " " + sentence
    if kept[-1] not in ".!?":
        kept = kept.rstrip(" ;,") + "."
    return kept[0].upper() + kept[1:]


def own_doc(obj: Any) -> str | None:
    """The object's own docstring; None if it is inherited from a base class or generated from a signature."""
    doc = getattr(obj, "__doc__", None)
    if not isinstance(doc, str):
        return None
    if inspect.isclass(obj):
        generated = doc.startswith(f"{obj.__name__}(") and "\n" not in doc.strip()
        if generated or doc in {base.__doc__ for base in obj.__mro__[1:]}:
            return None
    return doc


def candidate(name: str, obj: Any) -> Candidate:
    kind = "module" if inspect.ismodule(obj) else "class" if inspect.isclass(obj) else "function"
    return Candidate(name, kind, own_doc(obj))


def is_public(name: str, obj: Any) -> bool:
    if name.startswith("_") or (inspect.isclass(obj) and issubclass(obj, Warning)):
        return False
    return inspect.isclass(obj) or inspect.isroutine(obj)


def belongs(obj: Any, module: ModuleType) -> bool:
    """Whether the module, or the C module behind it, defines the object instead of importing it."""
    home = getattr(obj, "__module__", None) or module.__name__
    return home.lstrip("_").split(".")[0] == module.__name__.split(".")[0]


def resolve(dotted: str) -> Any:
    """The object a dotted name stands for: a module, a builtin or an attribute of either."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        parent, _, attribute = dotted.rpartition(".")
        return getattr(resolve(parent) if parent else builtins, attribute)


def candidates(names: dict[str, Any]) -> Iterator[Candidate]:
    """Everything `stdlib_names.toml` asks for; a name may come twice."""
    for member, obj in sorted(vars(builtins).items()):
        if is_public(member, obj):
            yield candidate(member, obj)
    for dotted in names["classes"].split():
        cls = resolve(dotted)
        yield candidate(dotted, cls)
        for member in sorted(dir(cls)):
            method = getattr(cls, member)
            if is_public(member, method) and not inspect.isclass(method):
                yield candidate(f"{dotted}.{member}", method)
    for dotted in names["whole_modules"].split():
        module = resolve(dotted)
        yield candidate(dotted, module)
        declared = getattr(module, "__all__", None)
        for member in sorted(declared or vars(module)):
            obj = getattr(module, member)
            if is_public(member, obj) and (declared or belongs(obj, module)):
                yield candidate(f"{dotted}.{member}", obj)
    for dotted in names["modules"].split():
        yield candidate(dotted, resolve(dotted))
    for parent, members in names["members"].items():
        for member in members.split():
            yield candidate(f"{parent}.{member}", resolve(f"{parent}.{member}"))


def facts(names: dict[str, Any]) -> list[Fact]:
    found: dict[str, Fact] = {}
    for name, kind, doc in candidates(names):
        answer = names["answers"].get(name) or (summary(doc, name) if doc else None)
        if answer and name not in found:
            found[name] = Fact(name, kind, answer)
    missing = names["answers"].keys() - found.keys()
    assert not missing, f"answers for names that nothing asks for: {sorted(missing)}"
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description="Extract the demo model's facts from docstrings.")
    parser.add_argument("--output", type=Path, default=HERE / "dataset.jsonl")
    output: Path = parser.parse_args().output
    rows = facts(tomllib.loads((HERE / "stdlib_names.toml").read_text(encoding="utf-8")))
    text = "".join(json.dumps(row._asdict()) + "\n" for row in rows)
    output.write_text(text, encoding="utf-8")
    version = sys.version.split()[0]
    print(f"{len(rows)} facts from Python {version}, {len(text) / 1000:.0f} kB: {output}")


if __name__ == "__main__":
    main()
