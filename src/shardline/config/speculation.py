"""What the user asked for with `--speculative-config`: vLLM's JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

_DEFAULT_LENGTH = 5
_MOST_TOKENS = 64
_MOST_REQUESTS = 1_000_000
_METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp")
_NGRAM_KEYS = ("prompt_lookup_max", "prompt_lookup_min")
_SUFFIX = "suffix_decoding_"
_HEAD_KEYS = ("model", "revision", "quantization", "draft_tensor_parallel_size")
_DRAFT_KEYS = (*_HEAD_KEYS, "draft_ranks")
_MTP_KEYS = ("draft_tensor_parallel_size",)
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'


@dataclass(frozen=True)
class Suffixes:
    """Drafts from a sequence itself and from earlier answers, by the longest suffix that occurred there. The names of
    the first four are vLLM's, behind `suffix_decoding_`."""

    max_tree_depth: int = 24
    """The most last tokens that are compared; 0: drafts are by `ngram`."""
    max_cached_requests: int = 10_000
    """The most answers that are kept; 0: none."""
    max_spec_factor: float = 1.0
    """A draft has at most this many times as many tokens as were equal before it."""
    min_token_prob: float = 0.1
    """Guesses are made if they are right at least this often."""
    share: bool = False
    """Whether the answers of one owner are guessed from for others."""


NO_SUFFIXES = Suffixes(0, 0, 0.0, 0.0)


DraftMethod = Literal["draft_model", "eagle", "eagle3", "mtp"]


@dataclass(frozen=True)
class DraftModel:
    """The second model, whose greedy continuation is the draft, or a head, which reads the first model's hidden states,
    too."""

    model: str
    """Empty: the weights are in the first model's checkpoint (`mtp`)."""
    revision: str | None = None
    quantization: str | None = None
    """The format of its linear weights, as the flag of the first model."""
    tensor_parallel_size: int | None = None
    """None: that of the first model, or as many as there are `ranks`."""
    method: DraftMethod = "draft_model"
    ranks: int = 0
    """Ranks that have nothing but the draft model, for each replica; 0: it runs on the ranks of the first model."""


@dataclass(frozen=True)
class Speculation:
    """How tokens are drafted: unless the last fields say so, from the sequence itself, as the tokens that followed an
    earlier occurrence of its last ones."""

    num_speculative_tokens: int
    """The most tokens of a draft; 0: nothing is drafted."""
    prompt_lookup_min: int
    prompt_lookup_max: int
    """A draft follows an earlier occurrence of the last n tokens, where n is as large as possible between the two."""
    suffixes: Suffixes = NO_SUFFIXES
    """If they have a depth, drafts are theirs, and the two lengths mean nothing."""
    draft: DraftModel | None = None
    """Set: drafts are its guesses, and the lengths mean nothing."""


NO_SPECULATION = Speculation(0, 0, 0)


def parse_speculation(given: str | Mapping[str, Any]) -> Speculation:
    """Read `--speculative-config`, or the keyword of `LLM`. If one of the two lengths of `ngram` is missing, the other
    one counts for both, as in vLLM; if both are missing, they are 5. A draft of `suffix` may be as long as its tree is
    deep if `num_speculative_tokens` is missing, as in vLLM.

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
    model = fields.get("model")
    method = fields.get("method", None if model is None else "draft_model")
    if method not in _METHODS:
        names = ", ".join(f'"{name}"' for name in _METHODS[:-1])
        raise ValueError(f'the method of speculative_config must be {names} or "{_METHODS[-1]}", got {method!r}')
    if model is not None and method not in ("draft_model", "eagle", "eagle3"):
        source = "by layers of the served model" if method == "mtp" else "from the text"
        raise ValueError(f'the method "{method}" of speculative_config drafts {source}: leave out the model {model!r}')
    own = {
        "ngram": _NGRAM_KEYS,
        "suffix": tuple(_SUFFIX + name for name in Suffixes.__annotations__)[:-1],
        "draft_model": _DRAFT_KEYS,
        "eagle": _HEAD_KEYS,
        "eagle3": _HEAD_KEYS,
        "mtp": _MTP_KEYS,
    }[method]
    known = ("method", "num_speculative_tokens", *own)
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ValueError(f"speculative_config has the unknown key {unknown[0]!r}; known: {', '.join(known)}")
    if method in ("ngram", "suffix"):
        return {"ngram": _ngram, "suffix": _suffix}[method](fields)
    return _draft_model(fields, cast(DraftMethod, method))


def _ngram(fields: Mapping[str, Any]) -> Speculation:
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


def _suffix(fields: Mapping[str, Any]) -> Speculation:
    depth = _whole(fields, _SUFFIX + "max_tree_depth", fields.get(_SUFFIX + "max_tree_depth", Suffixes.max_tree_depth))
    requests = fields.get(_SUFFIX + "max_cached_requests", Suffixes.max_cached_requests)
    if type(requests) is not int or not 0 <= requests <= _MOST_REQUESTS:
        raise ValueError(
            f"{_SUFFIX}max_cached_requests of speculative_config must be a whole number from 0 to {_MOST_REQUESTS}, "
            f"got {requests!r}"
        )
    suffixes = Suffixes(
        depth,
        requests,
        _number(fields, _SUFFIX + "max_spec_factor", Suffixes.max_spec_factor, _MOST_TOKENS),
        _number(fields, _SUFFIX + "min_token_prob", Suffixes.min_token_prob, 1),
    )
    most = _whole(fields, "num_speculative_tokens", fields.get("num_speculative_tokens", depth))
    return Speculation(most, 0, 0, suffixes)


def _draft_model(fields: Mapping[str, Any], method: DraftMethod) -> Speculation:
    for name in ("model", "revision", "quantization"):
        value = fields.get(name)
        is_needed = name == "model" and method != "mtp"
        if (value is not None or is_needed) and not (isinstance(value, str) and value):
            got = "nothing" if value is None else repr(value)
            raise ValueError(f"{name} of speculative_config must be a text that is not empty, got {got}")
    most = _whole(fields, "num_speculative_tokens", fields.get("num_speculative_tokens"))
    size = fields.get("draft_tensor_parallel_size")
    if size is not None:
        size = _whole(fields, "draft_tensor_parallel_size", size)
    ranks = fields.get("draft_ranks")
    ranks = 0 if ranks is None else _whole(fields, "draft_ranks", ranks)
    if ranks and size not in (None, ranks):
        raise ValueError(
            f"draft_ranks {ranks} of speculative_config: they share each layer of the draft model, so leave "
            f"draft_tensor_parallel_size {size} out"
        )
    model, revision, quantization = fields.get("model", ""), fields.get("revision"), fields.get("quantization")
    return Speculation(most, 0, 0, draft=DraftModel(model, revision, quantization, size, method, ranks))


def _whole(fields: Mapping[str, Any], name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _MOST_TOKENS:
        got = repr(value) if name in fields else "nothing"
        raise ValueError(f"{name} of speculative_config must be a whole number from 1 to {_MOST_TOKENS}, got {got}")
    return value


def _number(fields: Mapping[str, Any], name: str, usual: float, most: int) -> float:
    value = fields.get(name, usual)
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise ValueError(f"{name} of speculative_config must be a number from 0 to {most}, got {value!r}")
    return float(value)
