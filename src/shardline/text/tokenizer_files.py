"""The files beside a tokenizer: special tokens, the ids that end a text, and chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing.

    Raises:
        ValueError: the file does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a text: none, one or several, from generation_config.json, else from config.json."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(token_id) for token_id in value)
    return ()


def read_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens of a configuration: each is a string or an object with "content"."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def read_chat_templates(folder: Path) -> dict[str, str]:
    """The jinja sources of the chat templates by name; empty if the model has no template.

    chat_template.jinja takes precedence over chat_template.json, and that over tokenizer_config.json.

    Raises:
        ValueError: a file is broken.
    """
    sources: dict[str, str] = {}
    entry = read_json(folder / "tokenizer_config.json").get("chat_template")
    entry = read_json(folder / "chat_template.json").get("chat_template", entry)
    if isinstance(entry, str):
        sources["default"] = entry
    elif isinstance(entry, list):
        sources.update({str(named["name"]): str(named["template"]) for named in entry})
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = path.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return sources
