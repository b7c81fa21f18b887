"""Folders of formats in which models write: one file each, found by its name, with the class `Parser`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Generic, Protocol, TypeVar, cast


class Format(Protocol):
    """What every format says of itself."""

    other_names: ClassVar[tuple[str, ...]]
    template_marks: ClassVar[tuple[str, ...]]


Parser = TypeVar("Parser", bound=Format)


@dataclass(frozen=True)
class Formats(Generic[Parser]):
    """The formats in one package."""

    package: str
    path: Sequence[str]
    kind: str
    """What an error calls a format."""
    shared: Collection[str]
    """Files that are no format."""

    def names(self) -> list[str]:
        """The names of all formats."""
        return list(self._names)

    def find(self, name: str) -> type[Parser]:
        """The parser of this format, which may have other names.

        Raises:
            ValueError: there is no such format.
        """
        if name in self._names:
            return self._load(name)
        parsers = [self._load(known) for known in self._names]
        for parser in parsers:
            if name in parser.other_names:
                return parser
        others = sorted(other for parser in parsers for other in parser.other_names)
        raise ValueError(
            f"there is no {self.kind} {name!r}; there are {', '.join(self._names)}, and of the same formats as some of "
            f"these {', '.join(others)}"
        )

    def shown_by(self, template: str) -> dict[str, int]:
        """The formats all of whose marks a chat template has, and how many these are; those without marks are none."""
        marks = {name: self._load(name).template_marks for name in self._names}
        return {name: len(own) for name, own in marks.items() if own and all(mark in template for mark in own)}

    @cached_property
    def _names(self) -> list[str]:
        """Read once: every request that is parsed looks for its format."""
        return sorted(module.name for module in pkgutil.iter_modules(self.path) if module.name not in self.shared)

    def _load(self, name: str) -> type[Parser]:
        return cast("type[Parser]", importlib.import_module(f"{self.package}.{name}").Parser)
