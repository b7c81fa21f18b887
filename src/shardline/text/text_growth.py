"""How much longer a tokenizer's normalizer, pre-tokenizer or decoder can make a text.

Its files are foreign: a chain of a few rules can turn one character into billions.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

MAX_GROWTH = 256
"""Models have at most 40. Changes of case and of Unicode's normal form are not counted: repeated, they do nothing."""
MAX_RULES = 64
_FIXED = {
    "BertNormalizer": 3.0,
    "ByteLevel": 4.0,
    "Lowercase": 1.0,
    "NFC": 1.0,
    "NFD": 1.0,
    "NFKC": 1.0,
    "NFKD": 1.0,
    "Nmt": 1.0,
    "Strip": 1.0,
    "StripAccents": 1.0,
    "BPEDecoder": 1.0,
    "ByteFallback": 1.0,
    "CTC": 1.0,
    "Fuse": 1.0,
    "Metaspace": 2.0,
    "WordPiece": 2.0,
    "BertPreTokenizer": 1.0,
    "CharDelimiterSplit": 1.0,
    "Digits": 1.0,
    "FixedLength": 1.0,
    "Punctuation": 1.0,
    "Split": 1.0,
    "UnicodeScripts": 1.0,
    "Whitespace": 1.0,
    "WhitespaceSplit": 1.0,
}
_UNKNOWN = 4.0
_SEQUENCES = ("normalizers", "pretokenizers", "decoders")


def check_growth(part: Any, name: str) -> float:
    """The factor by which a part of a tokenizer, or None, makes a text longer at most.

    `part`: a normalizer, a pre-tokenizer or a decoder of the tokenizers library.

    Raises:
        ValueError: it is above MAX_GROWTH, or there are more than MAX_RULES rules.
    """
    if part is None:
        return 1.0
    rules = _flatten(json.loads(part.__getstate__()))
    growth = _Weights()
    for rule in reversed(rules[:MAX_RULES]):
        growth.put_before(rule)
    if len(rules) > MAX_RULES or growth.largest > MAX_GROWTH:
        raise ValueError(
            f"the tokenizer's {name} has {len(rules)} rules and can make a text {growth.largest:.3g} times as long; at "
            f"most {MAX_RULES} rules and {MAX_GROWTH} times are supported"
        )
    return growth.largest


class _Weights:
    """How many characters each character becomes by some rules."""

    def __init__(self) -> None:
        self._default = 1.0
        self._of: dict[str, float] = {}

    @property
    def largest(self) -> float:
        return max(self._default, *self._of.values()) if self._of else self._default

    def put_before(self, rule: Mapping[str, Any]) -> None:
        """Add a rule that runs before the others."""
        kind = str(rule.get("type"))
        if kind == "Replace":
            pattern = rule["pattern"].get("String")
            if pattern:
                weight = self._sum(rule["content"]) / len(pattern)
                self._of.update({char: max(self._sum(char), weight) for char in pattern})
            else:
                self._add(self._sum(rule["content"]))  # a regular expression may match between all characters
        elif kind == "Prepend":
            self._add(self._sum(rule["prepend"]))
        else:
            factor = _longest_entry(rule) if kind == "Precompiled" else _FIXED.get(kind, _UNKNOWN)
            self._default, self._of = factor * self.largest, {}

    def _sum(self, text: str) -> float:
        return sum(self._of.get(char, self._default) for char in text)

    def _add(self, weight: float) -> None:
        self._default += weight
        self._of = {char: own + weight for char, own in self._of.items()}


def _flatten(rule: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rules: list[Mapping[str, Any]] = []
    pending = [rule]
    while pending and len(rules) <= MAX_RULES:
        current = pending.pop()
        inner = next((current[key] for key in _SEQUENCES if key in current), None)
        if current.get("type") == "Sequence" and isinstance(inner, list):
            pending.extend(reversed(inner))
        else:
            rules.append(current)
    return rules


def _longest_entry(rule: Mapping[str, Any]) -> float:
    """The longest text that a character map of sentencepiece puts in a character's place, in characters."""
    try:
        data = base64.b64decode(rule.get("precompiled_charsmap") or "")
    except binascii.Error:
        return _UNKNOWN
    # The size of a trie in bytes, the trie, and the texts, which end in zeros.
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return float(max(1, *(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0"))))
