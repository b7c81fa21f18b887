"""What the user asked for with `--enable-eplb` and `--eplb-config`: vLLM's JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec

_EXAMPLE = '{"step_interval": 500, "num_redundant_experts": 8}'
_MOST = 1 << 30


class ExpertBalancing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    known = ExpertBalancing.__struct_fields__
    if unknown := next((name for name in fields if name not in known), None):
        raise ValueError(f"eplb_config has the unknown key {unknown!r}; known: {', '.join(known)}")
    try:
        balancing = msgspec.convert(fields, ExpertBalancing)
    except msgspec.ValidationError as error:
        raise ValueError(f"eplb_config: {error}") from None
    for name, least in (("window_size", 1), ("step_interval", 1), ("num_redundant_experts", 0)):
        value = getattr(balancing, name)
        if not least <= value < _MOST:
            raise ValueError(f"{name} of eplb_config must be a whole number from {least} on, got {value}")
    return balancing
