"""Router policies, one file each. A policy is found by the name of its file."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import cast

from shardline.routing.policies.base import Policy


def find_policy(name: str) -> Policy:
    """The policy with this name.

    Raises:
        ValueError: there is none. The message names all.
    """
    if name not in policy_names():
        raise ValueError(f"router policy {name!r}: known are {', '.join(policy_names())}")
    return cast(Policy, importlib.import_module(f"{__name__}.{name}"))


@functools.cache
def policy_names() -> tuple[str, ...]:
    """The names of all policies."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base"))
