"""What vLLM's command line takes besides flags: a file of them (--config), parts of JSON (--a.key value), -O3."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardline.config.vllm import vllm_options

_DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)\.([\w.-]+)")
_LEVEL = re.compile(r"-O=?(\d)")


def expand_words(words: Sequence[str], actions: Mapping[str, argparse.Action]) -> list[str]:
    """The command line as flags that argparse knows. `actions`: the known flags, by name.

    Raises:
        ValueError: the file of --config cannot be read, or a part of JSON has no value or two.
    """
    level = ["--optimization-level"] if "--optimization-level" in actions else []
    flat: list[str] = []
    for word in words:
        match = _LEVEL.fullmatch(word)
        flat += [*level, match[1]] if match and level else [word]
    if "--config" in actions:
        flat = _with_file(flat, actions)
    return _join_parts(flat, actions)


def _with_file(words: list[str], actions: Mapping[str, argparse.Action]) -> list[str]:
    """The words, and those of the file of --config whose flags are not among them."""
    place = next((i for i, word in enumerate(words) if word == "--config" or word.startswith("--config=")), None)
    if place is None:
        return words
    path = words[place].partition("=")[2]
    if not path:
        path = words[place + 1] if place + 1 < len(words) else ""
    flags_of: dict[int, str] = {}
    given = {id(actions[name]) for word in words if (name := word.split("=")[0].split(".")[0]) in actions}
    before: list[str] = []
    after: list[str] = []
    for key, value in read_config_file(path).items():
        name = "--" + key.replace("_", "-")
        if name in actions and (other := flags_of.setdefault(id(actions[name]), key)) != key:
            raise ValueError(f"--config {path}: {other} and {key} are the same flag; give one of them")
        if id(actions.get(name)) in given:
            continue  # the command line comes first
        if isinstance(value, bool):
            flags = [name] if value else [f"--no-{key.replace('_', '-')}"]
            after += flags if flags[0] in actions or value else []
        elif name == "--model":
            before = [name, str(value)]  # a model on the command line has no flag, and comes later
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            takes_one = name in actions and actions[name].nargs is None
            if (takes_one and len(values) != 1) or any(isinstance(one, list) for one in values):
                form = "takes one value, and no list" if takes_one else "has a list within a list"
                raise ValueError(f"--config {path}: {key} {form}")
            after += [name, *(json.dumps(one) if isinstance(one, dict) else str(one) for one in values)]
    return [*before, *words, *after]


def read_config_file(path: str) -> dict[str, Any]:
    """The flags in a file of --config, without dashes at their front, and their values.

    Raises:
        ValueError: it cannot be read, is no YAML mapping, or has a key twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            mapping: yaml.MappingNode = super().compose_mapping_node(anchor)
            lines: dict[Any, int] = {}
            for key in (key for key, _ in mapping.value if isinstance(key, yaml.ScalarNode)):
                line, name = key.start_mark.line + 1, (key.tag, key.value)
                if name in lines:
                    raise ValueError(
                        f"--config {path}: {key.value} is on line {lines[name]} and on line {line}; keep one of them"
                    )
                lines[name] = line
            return mapping

    try:
        values = yaml.load(Path(path).expanduser().read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--config {path}: cannot be read ({reason}); give a YAML file of flags") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"--config {path} must have flags and their values, such as 'port: 8001'")
    return values


def _join_parts(words: Sequence[str], actions: Mapping[str, argparse.Action]) -> list[str]:
    """The words with `--a-config.key value` as `--a-config '{"key": value}'`, also beside the rest of that JSON.

    As in vLLM, some flags stand for one: `--spec-method ngram` for `--speculative-config.method ngram`.
    """
    parts: dict[str, dict[tuple[str, ...], tuple[str, str]]] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        flag, equals, text = word.partition("=")
        found = _part(flag, actions)
        if found is None:
            rest.append(word)
            continue
        if not equals:
            if not left or left[0].startswith("--"):
                raise ValueError(f"{flag} needs a value")
            text = left.pop(0)
        whole, path = found
        others = parts.setdefault(whole, {})
        other = others.get(path, (flag, ""))[0]
        if other != flag:
            raise ValueError(f"{other} and {flag} are the same; give one of them")
        others[path] = flag, text  # of the same flag, the last one counts
    for whole, others in parts.items():
        value = _take_object(rest, actions[whole].option_strings, next(iter(others.values()))[0])
        for path, (flag, text) in others.items():
            _put(value, path, _value(text), flag)
        rest += [whole, json.dumps(value)]
    return rest


def _part(flag: str, actions: Mapping[str, argparse.Action]) -> tuple[str, tuple[str, ...]] | None:
    """The flag whose JSON has the part, by its first name, and the keys that lead there; None: the flag is none."""
    option = vllm_options().get(flag.removeprefix("--")) if flag.startswith("--") and flag in actions else None
    if option is not None and option.treatment == "part":
        flag = f"--{'.'.join(option.part)}"
    match = _DOTTED.fullmatch(flag)
    name = match[1].replace("_", "-") if match else ""
    if match is None or name not in actions or flag in actions:
        return None
    return actions[name].option_strings[0], tuple(match[2].split("."))


def _take_object(words: list[str], names: Sequence[str], part: str) -> dict[str, Any]:
    """Remove the flag that has these names and its JSON object from the words; empty: they do not have it.

    Raises:
        ValueError: its value is no JSON object, which `part` is to be a part of.
    """
    found: dict[str, Any] = {}
    place = 0
    while place < len(words):
        flag, equals, text = words[place].partition("=")
        if flag not in names or not (equals or place + 1 < len(words)):
            place += 1
            continue
        value = _value(text if equals else words[place + 1])
        if not isinstance(value, dict):
            raise ValueError(f"{flag} must be a JSON object, since {part} is a part of it; got {value}")
        found = value
        del words[place : place + (1 if equals else 2)]
    return found


def _put(whole: dict[str, Any], path: Sequence[str], value: Any, flag: str) -> None:
    """Set one part of an object, and of an object that is there already, what it does not have.

    Raises:
        ValueError: the object has it.
    """
    *keys, last = path
    node = whole
    for key in keys:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise _twice(flag, path)
    if last not in node:
        node[last] = value
    elif isinstance(node[last], dict) and isinstance(value, dict):
        for key, inner in value.items():
            _put(node[last], (key,), inner, flag)
    else:
        raise _twice(flag, path)


def _twice(flag: str, path: Sequence[str]) -> ValueError:
    return ValueError(f"{flag} is given twice, the other time as {'.'.join(path)!r} in JSON; give it once")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
