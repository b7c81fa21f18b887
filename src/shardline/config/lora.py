"""What the user asked for about LoRA adapters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

from shardline.config.fields import option

MOST_RANK = 512


class AdapterModule(NamedTuple):
    """An adapter that the user names."""

    name: str
    folder: str
    parent: str = ""
    """The base model, as the user calls it; empty: the served one."""


_KEYS = {"name", "path", "base_model_name"}
"""Of the JSON of one, as in vLLM."""


@dataclass(frozen=True)
class LoRAConfig:
    """Adapters of low rank (LoRA), one a request."""

    enable_lora: bool = option(False, "requests may name a LoRA adapter; steps mix any adapters and none")
    lora_modules: tuple[str, ...] = option(
        (),
        "adapters and the names by which requests choose them as their model: name=folder, or JSON, "
        """'{"name": …, "path": …, "base_model_name": …}'""",
    )
    max_loras: int = option(8, "adapters in memory at once; requests with further ones wait until one is not in use")
    max_lora_rank: int = option(16, f"largest rank of an adapter, at most {MOST_RANK}")
    lora_target_modules: tuple[str, ...] = option(
        (),
        "ends of the names of the modules that adapters may change, such as q_proj or experts: memory is kept free for "
        "these only, and adapters of others are refused; default: all that can be changed",
    )
    max_cpu_loras: int | None = option(
        None, "adapters in host memory, from where CPUs compute: if it is larger than --max-loras, it counts"
    )
    fully_sharded_loras: bool = option(
        False, "accepted for compatibility: each rank holds its own outputs of an adapter anyway"
    )

    @property
    def modules(self) -> list[AdapterModule]:
        """`lora_modules` as fields.

        Raises:
            ValueError: one cannot be read, or a name is there twice.
        """
        found = [_read_module(text) for text in self.lora_modules]
        names = [module.name for module in found]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"lora_modules names {twice!r} twice")
        return found

    @property
    def targets(self) -> tuple[str, ...]:
        """`lora_target_modules`; empty: adapters may change all that can be changed."""
        return tuple(self.lora_target_modules or ())

    @property
    def num_slots(self) -> int:
        """Adapters in memory at once; 0: requests name none."""
        return max(self.max_loras, self.max_cpu_loras or 0) if self.enable_lora else 0


def _read_module(text: str) -> AdapterModule:
    if text.lstrip().startswith("{"):
        try:
            values = json.loads(text)
        except ValueError:
            values = {}
        known = set(values) <= _KEYS and all(isinstance(value, str) for value in values.values())
        if not (known and values.get("name") and values.get("path")):
            raise ValueError(
                f"lora_modules must be name=folder, or JSON with name, path and perhaps base_model_name, got {text!r}"
            )
        return AdapterModule(values["name"], values["path"], values.get("base_model_name", ""))
    name, sign, folder = text.partition("=")
    if not (name and sign and folder):
        raise ValueError(f"lora_modules must be name=folder, got {text!r}")
    return AdapterModule(name, folder)
