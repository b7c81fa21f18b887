"""Finds out whether torch computes something itself, between the kernels of a step that is recorded."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TorchDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects torch's own operations, which no program can replay. Views compute nothing, so they are allowed."""

    computed: str | None = None
    """The last of its operations; None: there was none."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because True would make torch import torch.compile, which takes one and a half seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # `reshape` and `to` may return views or copies.
        if not func.is_view or _storages(result) - _storages(args):
            self.computed = str(func)
        return result


@functools.cache
def resolve_operators() -> None:
    """Look up all of torch's operators, for a process in which several threads record.

    Under a dispatch mode, torch creates an operator's Python object at its first use and keeps a pointer without owning
    the object. If two threads do this at once, one object replaces the other, which is freed while its thread still
    uses it.
    """
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace == "aten":
            packet, _, overload = operator.partition(".")
            getattr(getattr(torch.ops.aten, packet), overload or "default")


def _storages(values: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
