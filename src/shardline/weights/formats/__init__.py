"""One file per weight format, found by its name; `weights.base.WeightFormat` is the contract."""

from __future__ import annotations

import pkgutil


def format_names() -> list[str]:
    """The names of all formats that have a file here."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))
