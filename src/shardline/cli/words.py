"""What vLLM's command line takes besides flags: a file of them (--config), parts of JSON (--a.key value), -O3."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardline.config.vllm import vllm_options

_DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)\.([\w.-]+)(?:=(.*))?", re.DOTALL)
_LEVEL = re.compile(r"-O=?(\d)")


def expand_words(words: Sequence[str], actions: Mapping[str, argparse.Action]) -> list[str]:
    """The command line as flags that argparse knows. `actions`: the known flags, by name.

    Raises:
        ValueError: the file of --config cannot be read, or a part of JSON has no value.
    """
    level = ["--optimization-level"] if "--optimization-level" in actions else []
    flat: list[str] = []
    for word in words:
        match = _LEVEL.fullmatch(word)
        flat += [*level, match[1]] if match and level else [word]
    if "--config" in actions:
        flat = _with_file(flat, actions)
    return _join_parts([_with_dots(word, actions) for word in flat], actions)


def _with_dots(word: str, actions: Mapping[str, argparse.Action]) -> str:
    """`--spec-method=ngram` becomes `--speculative-config.method=ngram`: vLLM's flags for a part of JSON."""
    flag, equals, value = word.partition("=")
    option = vllm_options().get(flag.removeprefix("--")) if flag.startswith("--") and flag in actions else None
    if option is None or option.treatment != "part":
        return word
    return f"--{'.'.join(option.part)}{equals}{value}"


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
    """The words with `--a-config.key value` as `--a-config '{"key": value}'`, also beside the rest of that JSON."""
    joined: dict[str, dict[str, Any]] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        match = _DOTTED.fullmatch(word)
        name = match[1].replace("_", "-") if match else ""
        if match is None or name not in actions or word.split("=")[0] in actions:
            rest.append(word)
            continue
        text = match[3] if match[3] is not None else left.pop(0) if left and not left[0].startswith("--") else None
        if text is None:
            raise ValueError(f"{word} needs a value")
        node = joined.setdefault(name, {})
        *path, last = match[2].split(".")
        for key in path:
            inner = node.setdefault(key, {})
            node = inner if isinstance(inner, dict) else {}
        node[last] = _value(text)
    for name, value in joined.items():
        whole = _take_object(rest, name)
        rest += [name, json.dumps(_merged(whole, value))]
    return rest


def _take_object(words: list[str], name: str) -> dict[str, Any]:
    """Remove `name` and its JSON object from the words; empty: they do not have it."""
    for place, word in enumerate(words):
        flag, equals, text = word.partition("=")
        if flag == name and (equals or place + 1 < len(words)):
            value = _value(text if equals else words[place + 1])
            if isinstance(value, dict):
                del words[place : place + (1 if equals else 2)]
                return value
    return {}


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(one)
    for key, value in other.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
