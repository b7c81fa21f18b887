"""What the user asked for with `--speculative-config`: vLLM's JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DEFAULT_LENGTH = 5
_MOST_TOKENS = 64
_KEYS = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'


@dataclass(frozen=True)
class Speculation:
    """Drafts from the sequence itself: the tokens that followed an earlier occurrence of its last tokens."""

    num_speculative_tokens: int
    """The most tokens of a draft; 0: nothing is drafted."""
    prompt_lookup_min: int
    prompt_lookup_max: int
    """A draft follows an earlier occurrence of the last n tokens, where n is as large as possible between the two."""


NO_SPECULATION = Speculation(0, 0, 0)


def parse_speculation(given: str | Mapping[str, Any]) -> Speculation:
    """Read `--speculative-config`, or the keyword of `LLM`. If one of the two lengths is missing, the other one counts
    for both, as in vLLM; if both are missing, they are 5.

    Raises:
        ValueError: it is not JSON, has other keys or values, or asks for another method.
    """
    fields: Any = given
    if isinstance(given, str):
        try:
            fields = json.loads(given)
        except ValueError:
            raise ValueError(f"speculative_config must be a JSON object like {_EXAMPLE}, got {given!r}") from None
    if not isinstance(fields, Mapping):
        raise ValueError(f"speculative_config must be a JSON object like {_EXAMPLE}, got {given!r}")
    method = fields.get("method")
    model = fields.get("model")
    if method != "ngram":
        what = f"the model {model!r}" if method is None and model is not None else repr(method)
        raise ValueError(f'the method of speculative_config must be "ngram", the only one so far, got {what}')
    if model is not None:
        raise ValueError(
            f'the method "ngram" of speculative_config drafts from the text: leave out the model {model!r}'
        )
    unknown = [name for name in fields if name not in _KEYS]
    if unknown:
        raise ValueError(f"speculative_config has the unknown key {unknown[0]!r}; known: {', '.join(_KEYS)}")
    shortest, longest = fields.get("prompt_lookup_min"), fields.get("prompt_lookup_max")
    if shortest is None:
        shortest = _DEFAULT_LENGTH if longest is None else longest
    if longest is None:
        longest = shortest
    speculation = Speculation(
        _whole(fields, "num_speculative_tokens", fields.get("num_speculative_tokens")),
        _whole(fields, "prompt_lookup_min", shortest),
        _whole(fields, "prompt_lookup_max", longest),
    )
    if speculation.prompt_lookup_min > speculation.prompt_lookup_max:
        raise ValueError(f"prompt_lookup_min ({shortest}) of speculative_config is above prompt_lookup_max ({longest})")
    return speculation


def _whole(fields: Mapping[str, Any], name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_TOKENS:
        got = repr(value) if name in fields else "nothing"
        raise ValueError(f"{name} of speculative_config must be a whole number from 1 to {_MOST_TOKENS}, got {got}")
    return value
