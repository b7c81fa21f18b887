"""Options and variables of vLLM: what becomes of each, as `vllm.toml` and `vllm_variables.toml` say."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from shardline.config.fields import json_object

_PROTECTIVE_WORDS = re.compile(
    r"_(AUTH|AUTHORIZATION|CERT|CERTFILE|KEY|KEYS|KEYFILE|PASSWORD|SECRET|SSL|TLS|ALLOWLIST|DENYLIST)(_|$)"
)


@dataclass(frozen=True)
class VllmOption:
    """An option of vLLM that Shardline does not have."""

    name: str
    """As a flag, without the dashes at its front."""
    takes: Literal["switches", "values", "lists", "keywords"]
    """What follows the flag: nothing, a word, or several; keywords are no flags."""
    treatment: Literal["nothing", "only", "refused", "part"]
    reason: str
    allowed: tuple[str, ...] = ()
    """The values that are taken, of a treatment "only"."""
    part: tuple[str, str] = ("", "")
    """Of a treatment "part": the option whose JSON object has it, without dashes at its front, and the key there."""

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
    for entry in table["part"]:
        for name, key in entry["keys"].items():
            reason = f"--{entry['of']}.{key} is the same"
            options[name] = VllmOption(name, "values", "part", reason, part=(entry["of"], key))
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
        if option.treatment == "part":
            whole, key = option.part[0].replace("-", "_"), option.part[1]
            known = options.get(whole)
            parts = known if isinstance(known, Mapping) else json_object(whole, known)
            if key in parts:
                raise ValueError(f"{name} is given twice, the other time as {key!r} in JSON; give it once")
            options[whole] = {**parts, key: value}
            continue
        if line := option.take(value, name):
            lines.append(line)
    return lines


@dataclass(frozen=True)
class VllmVariables:
    """One entry of the table."""

    treatment: Literal["same", "bounds", "nothing", "refused"]
    names: tuple[str, ...]
    """They may have * for any letters."""
    reason: str
    most: int = 0
    """Of "bounds": the bound that is kept here."""
    harmless: tuple[str, ...] = ()

    def note(self, name: str, value: str) -> str:
        """The line of the log about a variable.

        Raises:
            ValueError: it would change what a user gets.
        """
        if self.treatment == "same":
            return f"the variable {name} is used: {self.reason}"
        if self.treatment == "bounds":
            if value.isdecimal() and int(value) >= self.most:
                return f"the variable {name} has no effect: at most {self.most} {self.reason} are taken anyway"
            raise ValueError(
                f"the variable {name} is set, but the bound is fixed here: at most {self.most} {self.reason}; unset it"
            )
        if self.treatment == "refused" and value not in self.harmless:
            raise ValueError(f"the variable {name} is set, but {self.reason}; unset it")
        return f"the variable {name} has no effect: {self.reason}"


@cache
def variable_table() -> tuple[VllmVariables, ...]:
    """All entries. The first one that has a name counts."""
    table = tomllib.loads((files(__package__) / "vllm_variables.toml").read_text(encoding="utf-8"))
    entries: list[VllmVariables] = []
    for treatment in ("same", "bounds", "refused", "nothing"):
        for entry in table[treatment]:
            reason = entry.get("reason") or entry["meaning"]
            harmless = tuple(entry.get("harmless", ()))
            entries.append(VllmVariables(treatment, tuple(entry["names"]), reason, entry.get("most", 0), harmless))
    return tuple(entries)


def find_variable(name: str) -> VllmVariables | None:
    """The entry of a variable; None: it is unknown."""
    return next((entry for entry in variable_table() if any(fnmatchcase(name, one) for one in entry.names)), None)


def note_variables(variables: Mapping[str, str]) -> list[str]:
    """A line for each VLLM_* variable that is set.

    Raises:
        ValueError: one protects something, or would change what a user gets, and has no counterpart here.
    """
    lines = []
    for name, value in sorted(variables.items()):
        if not value:
            continue
        entry = find_variable(name)
        if entry is not None:
            lines.append(entry.note(name, value))
        elif _PROTECTIVE_WORDS.search(name):
            raise ValueError(
                f"the variable {name} seems to protect the server, but it is not understood; unset it. "
                "Keys are given in VLLM_API_KEY, SHARDLINE_API_KEY or --api-key-file"
            )
        else:
            lines.append(f"the variable {name} is not known, and has no effect")
    return lines


def options_from_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    """Options of the engine that variables set.

    Raises:
        ValueError: a value is no number.
    """
    options: dict[str, Any] = {}
    space = variables.get("VLLM_CPU_KVCACHE_SPACE", "")
    if space:
        if not space.isdecimal():
            raise ValueError(f"the variable VLLM_CPU_KVCACHE_SPACE must be a whole number of GiB, got {space!r}")
        if int(space):
            options["kv_cache_memory"] = f"{space}GiB"
    if stages := variables.get("VLLM_PP_LAYER_PARTITION"):
        options["pipeline_stages"] = stages
    return options
