"""What the layers of a step compute alike from its tables, computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

_Value = TypeVar("_Value")
_MOST = 48


class Kept:
    """Values by the identity of the tensors that they follow from. Nobody may write to such tensors afterwards."""

    def __init__(self) -> None:
        self._values: dict[Hashable, tuple[tuple[Tensor, ...], Any]] = {}

    def value_of(self, tensors: tuple[Tensor, ...], more: Hashable, make: Callable[[], _Value]) -> _Value:
        """What `make` returns for these tensors, and for `more`."""
        key = (*map(id, tensors), more)
        if key not in self._values:
            if len(self._values) == _MOST:
                self._values.clear()
            self._values[key] = tensors, make()  # the tensors live on, so that their ids stay theirs
        value: _Value = self._values[key][1]
        return value
