"""Tokens that a GGUF file names by their ids: those that begin and end a text, and that stand for the unknown."""

from __future__ import annotations

from shardline.checkpoints.gguf.header import GGUFHeader

_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def special_ids(header: GGUFHeader) -> dict[str, int]:
    """The ids of bos_token, eos_token, unk_token and pad_token, as far as the file names them.

    Raises:
        ValueError: an entry is no id.
    """
    found = {name: token_id(header, key) for name, key in _IDS.items()}
    return {name: number for name, number in found.items() if number is not None}


def end_token_ids(header: GGUFHeader) -> tuple[int, ...]:
    """The ids that the file names as the end of a text, of a turn and of a message.

    Raises:
        ValueError: an entry is no id.
    """
    found = (token_id(header, key) for key in _ENDS)
    return tuple(dict.fromkeys(number for number in found if number is not None))


def token_id(header: GGUFHeader, key: str) -> int | None:
    """The id in tokenizer.ggml.`key`; None: it is missing.

    Raises:
        ValueError: it is no id.
    """
    full = f"tokenizer.ggml.{key}"
    value = header.metadata.get(full)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise header.error(full, f"must be the id of a token, got {value!r:.40}")
    # Old files say "none" like this.
    return None if value == 0xFFFFFFFF else value
