"""What the files of a model say about text: its tokenizer, in Hugging Face format or in a GGUF file, and its chat
templates, or a template in their place.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from shardline.checkpoints.folder_files import MAX_TOKENIZER_BYTES, read_bytes, read_json, read_text, read_token_ids
from shardline.checkpoints.gguf.header import read_header
from shardline.checkpoints.gguf.names import is_gguf
from shardline.checkpoints.gguf.tokenizer import has_vocabulary, read_vocabulary
from shardline.checkpoints.gguf.tokenizer import read_chat_templates as read_gguf_templates
from shardline.text.special_tokens import FOREIGN_CODE

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class StoredTokenizer:
    """A tokenizer as its files have it; see `tokenizer.Tokenizer`."""

    file: Path
    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]


def read_tokenizer(folder: Path) -> StoredTokenizer | None:
    """The tokenizer in `folder`, or in a GGUF file. None: there is none.

    Raises:
        ValueError: the files are broken.
    """
    if is_gguf(folder):
        header = read_header(folder)
        if not has_vocabulary(header):
            return None
        vocabulary = read_vocabulary(header)
        return StoredTokenizer(folder, vocabulary.tokenizer, vocabulary.special_tokens, tuple(vocabulary.end_token_ids))
    path = folder / "tokenizer.json"
    if not path.exists():
        for other in ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json"):
            if (folder / other).is_file():
                raise ValueError(
                    f"{folder} has {other} but no tokenizer.json; save one with "
                    "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
                )
        return None
    content = read_bytes(path, MAX_TOKENIZER_BYTES)
    try:
        with FOREIGN_CODE:
            backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:
        raise ValueError(f"{path} is not a tokenizer: {' '.join(str(error).split())}") from error
    special = read_special_tokens(read_json_if_there(folder / "special_tokens_map.json"))
    special.update(read_special_tokens(read_json_if_there(folder / "tokenizer_config.json")))
    return StoredTokenizer(path, backend, special, read_eos_token_ids(folder))


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
    tokens: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def read_chat_templates(folder: Path) -> dict[str, str]:
    """The jinja sources of the chat templates in a folder or a GGUF file by name; empty if the model has none.

    chat_template.jinja takes precedence over chat_template.json, and that over tokenizer_config.json.

    Raises:
        ValueError: a file is broken.
    """
    if is_gguf(folder):
        return read_gguf_templates(read_header(folder))
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


def read_template(source: str) -> str:
    """The text of a template that is given as a file, or as itself.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        return source if "{" in source else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {source!r} ({error}); give a file, or the template itself") from error
