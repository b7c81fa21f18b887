"""What the events of a stream say together."""

from __future__ import annotations

import json
from typing import Any


def said_by(path: str, raw: bytes) -> Any:
    """What a stream of this endpoint says, however its tokens are spread over events, without its ids."""
    if path in ("/v1/messages", "/v1/responses"):
        return joined_items(raw)
    said = joined(raw)
    assert len(said["ids"]) == 1, "all events have one id and one time"
    return {**said, "ids": 0}


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


def joined_items(raw: bytes) -> list[dict[str, Any]]:
    """The events of a response, or of a message of Anthropic's, with deltas in a row as one.

    Times are left out, and ids are replaced by their order. Numbers of events must have no gap.
    """
    found: list[dict[str, Any]] = []
    ids: dict[str, str] = {}
    numbers: list[int] = []
    for block in filter(None, raw.split(b"\n\n")):
        kind, data = block.split(b"\ndata: ")
        event = _without_ids(json.loads(data), ids)
        assert kind == b"event: " + event["type"].encode()
        numbers.append(event.pop("sequence_number", len(numbers)))
        for one in (event, event.get("response", {})):
            one.pop("created_at", None)
            one.pop("completed_at", None)
        previous = found[-1] if found else {}
        if "delta" in event and {**previous, "delta": 0} == {**event, "delta": 0} and isinstance(event["delta"], str):
            previous["delta"] += event["delta"]
        elif event["type"] == previous.get("type") == "content_block_delta" and event["index"] == previous["index"]:
            (name,) = set(event["delta"]) - {"type"}
            previous["delta"][name] += event["delta"][name]
        else:
            found.append(event)
    assert numbers == list(range(len(numbers)))
    return found


def _without_ids(value: Any, ids: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_without_ids(one, ids) for one in value]
    if not isinstance(value, dict):
        return value
    names = ("id", "item_id", "call_id")
    return {
        name: ids.setdefault(one, f"id {len(ids)}")
        if name in names and isinstance(one, str)
        else _without_ids(one, ids)
        for name, one in value.items()
    }
