"""What the events of a stream say together."""

from __future__ import annotations

import json
from typing import Any


def joined(raw: bytes) -> dict[str, Any]:
    """What a stream says, however its tokens are spread over events; `ids` has each (id, created).

    Ids of tool calls are left out: they are drawn anew in each run.
    """
    said: dict[str, Any] = {"choices": {}, "ids": set(), "ends": []}
    for block in raw.split(b"\n\n"):
        if not block.startswith(b"data: "):
            assert not block or block.startswith(b": still"), block
        elif block == b"data: [DONE]":
            said["ends"].append("[DONE]")
        else:
            _add_event(said, json.loads(block[len(b"data: ") :]))
    return said


def _add_event(said: dict[str, Any], event: dict[str, Any]) -> None:
    if "error" in event:
        said["ends"].append(event["error"]["code"])
        return
    said["ids"].add((event.pop("id"), event.pop("created")))
    for choice in event.pop("choices"):
        _add(said["choices"].setdefault(choice.pop("index"), {}), choice)
    said.update(event)


def _add(said: dict[str, Any], new: dict[str, Any]) -> None:
    """Add the fields of a part of an answer to those before it."""
    for name, value in new.items():
        if value is None or name == "id":
            continue
        if name == "tool_calls":
            for call in value:
                _add(said.setdefault(name, {}).setdefault(call.pop("index"), {}), call)
        elif isinstance(value, dict):
            _add(said.setdefault(name, {}), value)
        elif name in said and isinstance(value, (str, list)):
            said[name] += value
        else:
            said[name] = value
