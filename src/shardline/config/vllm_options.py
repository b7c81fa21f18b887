"""Options of vLLM that Shardline does not have: what becomes of each, as `vllm.toml` says."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class VllmOption:
    """One option of vLLM."""

    name: str
    """As a flag, without the dashes at its front."""
    takes: Literal["switches", "values", "lists", "keywords"]
    """What follows the flag: nothing, a word, or several; keywords are no flags."""
    treatment: Literal["nothing", "only", "refused"]
    reason: str
    allowed: tuple[str, ...] = ()
    """The values that are taken, of a treatment "only"."""

    def take(self, value: Any, spelling: str) -> str:
        """The line of the log about an option that is taken; empty: it says what happens anyway.

        Raises:
            ValueError: the option, or this value of it, would change what a user gets.
        """
        if self.treatment == "refused":
            raise ValueError(f"{spelling} is not supported yet: {self.reason}")
        if self.treatment == "only":
            if str(value) not in self.allowed:
                raise ValueError(f"{spelling} {value} is not supported: {self.reason}")
            return ""
        return f"{spelling} has no effect: {self.reason}"


@cache
def vllm_options() -> dict[str, VllmOption]:
    """All options, by name."""
    table = tomllib.loads((files(__package__) / "vllm.toml").read_text(encoding="utf-8"))
    options: dict[str, VllmOption] = {}
    for treatment in ("nothing", "only", "refused"):
        for entry in table[treatment]:
            allowed = tuple(entry.get("allowed", ()))
            for takes in ("switches", "values", "lists", "keywords"):
                for name in entry.get(takes, ()):
                    assert name not in options, name
                    options[name] = VllmOption(name, takes, treatment, entry["reason"], allowed)
    return options


def take_keywords(options: dict[str, Any]) -> list[str]:
    """Remove the keywords that are vLLM's from `options`; returns the lines of the log about them.

    Raises:
        ValueError: a keyword, or its value, would change what a user gets.
    """
    lines = []
    for name in list(options):
        option = vllm_options().get(name.replace("_", "-"))
        if option is None:
            continue
        value = options.pop(name)
        # Code that fills in vLLM's defaults asks for nothing.
        if value is None or (value is False and option.treatment != "only"):
            continue
        if line := option.take(value, name):
            lines.append(line)
    return lines
