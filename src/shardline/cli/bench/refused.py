"""Flags of `vllm bench` that are known and refused with a reason, instead of being unknown."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn


def add_refused_flags(parser: argparse.ArgumentParser, names_by_reason: Mapping[str, Sequence[str]]) -> None:
    """Add hidden flags that end the command with their reason. Names have no dashes at the front."""
    for reason, names in names_by_reason.items():
        for name in names:
            parser.add_argument(f"--{name}", action=_Refuse, reason=reason)


class _Refuse(argparse.Action):
    """A flag that is known but cannot be used."""

    def __init__(self, option_strings: Sequence[str], dest: str, reason: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs="*", help=argparse.SUPPRESS)
        self._reason = reason

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} is not supported: {self._reason}")
