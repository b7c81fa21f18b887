"""Keys of watermarks. A key file is JSON with the fields of transformers' WatermarkingConfig (scheme kgw), or of its
SynthIDTextWatermarkingConfig (scheme synthid). A detector needs nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any, Literal

import msgspec

from shardline.watermark import SCHEMES, Scheme

_MOST_BYTES = 1 << 16
_MOST_LAYERS = 64
_NEW_LAYERS = 30
"""As many layers as the SynthID paper uses."""
_TABLE_SIZE = 1 << 16


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


class KGWKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="scheme", tag="kgw"):
    """Green lists (Kirchenbauer et al. 2023): after each context a secret part of the vocabulary gets a bonus.

    Raises:
        ValueError: a value is out of its range.
    """

    hashing_key: int
    """The secret."""
    greenlist_ratio: float = 0.25
    """The green part of the vocabulary."""
    bias: float = 2.0
    """What is added to the logits of green tokens, at temperature 1."""
    seeding_scheme: Literal["lefthash", "selfhash"] = "lefthash"
    """lefthash: the last token decides what is green; selfhash: the last tokens, and the next one itself."""
    context_width: int = 1
    """How many tokens must be there; selfhash: how many decide, the next one among them."""

    def __post_init__(self) -> None:
        _require(1 <= self.hashing_key < 1 << 63, "hashing_key must be a whole number from 1 to 2**63 - 1")
        _require(0.0 < self.greenlist_ratio < 1.0, "greenlist_ratio must be between 0 and 1")
        _require(-100.0 <= self.bias <= 100.0, "bias must be in [-100, 100]")
        _require(1 <= self.context_width <= 64, "context_width must be in [1, 64]")

    def __repr__(self) -> str:
        return "KGWKey(secret)"


class SynthIDKey(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="scheme", tag="synthid"
):
    """Tournament sampling (Dathathri et al. 2024): each layer of a tournament prefers the tokens whose secret bit is 1.

    Raises:
        ValueError: a value is out of its range.
    """

    keys: tuple[int, ...]
    """The secret: one number for each layer."""
    ngram_len: int = 5
    """A token and those before it that decide its bits."""
    context_history_size: int = 1024
    """A context that is among so many earlier ones of the answer leaves no mark."""
    sampling_table_seed: int = 0
    sampling_table_size: int = _TABLE_SIZE
    skip_first_ngram_calls: bool = False
    """Whether the first ngram_len - 1 tokens of an answer have no mark."""
    debug_mode: bool = False
    """Must be false; transformers writes it."""

    def __post_init__(self) -> None:
        _require(
            1 <= len(self.keys) <= _MOST_LAYERS, f"keys must have 1 to {_MOST_LAYERS} numbers, got {len(self.keys)}"
        )
        _require(all(-(1 << 63) <= key < 1 << 63 for key in self.keys), "keys must be whole numbers of 64 bits")
        _require(2 <= self.sampling_table_size <= 1 << 24, "sampling_table_size must be in [2, 2**24]")
        different = {key % self.sampling_table_size for key in self.keys}
        _require(len(different) == len(self.keys), "keys must differ, also modulo sampling_table_size")
        _require(2 <= self.ngram_len <= 17, "ngram_len must be in [2, 17]")
        _require(1 <= self.context_history_size <= 1 << 16, "context_history_size must be in [1, 65536]")
        _require(0 <= self.sampling_table_seed < 1 << 63, "sampling_table_seed must be in [0, 2**63)")
        _require(not self.debug_mode, "debug_mode must be false: it replaces the model's probabilities")

    def __repr__(self) -> str:
        return "SynthIDKey(secret)"


WatermarkKey = KGWKey | SynthIDKey


def key_name(key: WatermarkKey) -> str:
    """The key's scheme with four digits, by which servers see that their keys differ; they tell little of the key."""
    return scheme_of(key) + hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:4]


def scheme_of(key: WatermarkKey) -> Scheme:
    """The scheme that a key is of."""
    return "kgw" if isinstance(key, KGWKey) else "synthid"


def parse_key(fields: Any) -> WatermarkKey:
    """The key in the fields of a key file.

    Raises:
        ValueError: it is none; the message names the field.
    """
    _require(isinstance(fields, dict), "it must be a JSON object")
    scheme = fields.get("scheme", "kgw" if "hashing_key" in fields else "synthid" if "keys" in fields else None)
    _require(scheme is not None, "it must have hashing_key (kgw) or keys (synthid)")
    _require(scheme in SCHEMES, f"its scheme must be {' or '.join(SCHEMES)}, got {scheme!r}")
    try:
        return msgspec.convert(fields, KGWKey) if scheme == "kgw" else msgspec.convert(fields, SynthIDKey)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).removesuffix(" - at `$`")) from None


def read_key(path: str | os.PathLike[str]) -> WatermarkKey:
    """The key in a file.

    Raises:
        ValueError: there is no such file, or it has no key; the message does not have the secret.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"the watermark key {path} cannot be read: {error.strerror}") from None
    try:
        _require(len(data) <= _MOST_BYTES, f"it must have at most {_MOST_BYTES} bytes")
        try:
            fields = json.loads(data)
        except ValueError:
            raise ValueError("it must be a JSON object") from None
        return parse_key(fields)
    except ValueError as error:
        raise ValueError(f"the watermark key {path} cannot be used: {error}") from None


def new_key(scheme: Scheme) -> WatermarkKey:
    """A random key with the scheme's usual parameters."""
    if scheme == "kgw":
        return KGWKey(hashing_key=1 + secrets.randbelow((1 << 63) - 1))
    ends = secrets.SystemRandom().sample(range(_TABLE_SIZE), _NEW_LAYERS)
    return SynthIDKey(keys=tuple(secrets.randbelow((1 << 63) // _TABLE_SIZE) * _TABLE_SIZE + end for end in ends))


def write_key(key: WatermarkKey, path: str | os.PathLike[str]) -> None:
    """Write a new key file, which only its owner can read.

    Raises:
        ValueError: the file cannot be made, or is there already.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(
            f"there is a file {path} already, and texts that a key in it has marked are found with that key only: "
            "give another name, or move the file away"
        ) from None
    except OSError as error:
        raise ValueError(f"the watermark key {path} cannot be written: {error.strerror}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(key), indent=2) + b"\n")
