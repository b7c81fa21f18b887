"""What the user asked for with `--enable-eplb` and `--eplb-config`: vLLM's JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

_EXAMPLE = '{"step_interval": 500, "num_redundant_experts": 8}'
_MOST = 1 << 30


@dataclass(frozen=True)
class ExpertBalancing:
    """When experts move between the ranks that share them. The names are vLLM's."""

    window_size: int = 500
    """Steps whose load counts: the last ones before a decision."""
    step_interval: int = 500
    """Steps from one decision to the next; 0: experts stay where they are."""
    num_redundant_experts: int = 0
    """Places of each layer for further copies of experts, over all ranks that share it."""
    log_balancedness: bool = False
    """Whether each decision is logged."""
    use_async: bool = True
    """Without effect: experts are always read while steps go on."""


NO_BALANCING = ExpertBalancing(step_interval=0)


def parse_balancing(text: str | None) -> ExpertBalancing:
    """Read the JSON of `--eplb-config`. None: the defaults.

    Raises:
        ValueError: it is no JSON object, or has other keys or values.
    """
    if text is None:
        return ExpertBalancing()
    try:
        fields: Any = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"eplb_config must be a JSON object like {_EXAMPLE}, got {text!r}")
    known = {field.name: field.default for field in dataclasses.fields(ExpertBalancing)}
    for name, value in fields.items():
        if name not in known:
            raise ValueError(f"eplb_config has the unknown key {name!r}; known: {', '.join(known)}")
        least = 0 if name == "num_redundant_experts" else 1
        if isinstance(known[name], bool):
            if not isinstance(value, bool):
                raise ValueError(f"{name} of eplb_config must be true or false, got {value!r}")
        elif type(value) is not int or not least <= value <= _MOST:
            raise ValueError(f"{name} of eplb_config must be a whole number from {least} to {_MOST:,}, got {value!r}")
    return ExpertBalancing(**fields)
