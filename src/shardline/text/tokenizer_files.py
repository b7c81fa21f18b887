"""The files beside a tokenizer: special tokens, the ids that end a text, and chat templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardline.checkpoints.folder_files import read_json, read_text, read_token_ids

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing.

    Raises:
        ValueError: the file does not hold a JSON object, or exceeds a limit.
    """
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a text: none, one or several, from generation_config.json, else from config.json."""
    for name in ("generation_config.json", "config.json"):
        ids = read_token_ids(read_json_if_there(folder / name).get("eos_token_id"), folder / name)
        if ids:
            return ids
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
    entry = read_json_if_there(folder / "tokenizer_config.json").get("chat_template")
    entry = read_json_if_there(folder / "chat_template.json").get("chat_template", entry)
    if isinstance(entry, str):
        sources["default"] = entry
    elif isinstance(entry, list):
        try:
            sources.update({str(named["name"]): str(named["template"]) for named in entry})
        except (TypeError, KeyError):
            raise ValueError(f"{folder}: each chat_template must have a name and a template") from None
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = read_text(path)
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = read_text(folder / "chat_template.jinja")
    return sources
