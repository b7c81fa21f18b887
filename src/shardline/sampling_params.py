"""How a user wants the tokens of a request to be chosen."""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from typing import Any

import msgspec


class RequestOutputKind(enum.Enum):
    """What each output of a stream has: `AsyncLLM.generate` reads it. `LLM` returns whole outputs only."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """What is new since the output before."""
    FINAL_ONLY = 2
    """There is one output, at the end."""


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The form that an output must have. Exactly one of the first six is set. Names and meanings are vLLM's.

    Raises:
        ValueError: none of the forms is set, or several are.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: Sequence[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """In Lark or GBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Text with tags that begin parts of a required form, as an object or as its JSON."""
    disable_any_whitespace: bool | None = None
    """True: JSON has no whitespace except one space after each comma and colon. This is the default for schemas. Free
    objects may be indented by default. False: up to 40 characters of whitespace."""
    disable_additional_properties: bool | None = None
    """True: objects of a schema have no properties but those that it names, unless it says otherwise. None: the same,
    but for schemas that combine others. False: they may have further ones."""
    whitespace_pattern: str | None = None
    """A regular expression for the whitespace in JSON."""

    def __post_init__(self) -> None:
        names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must set one of {', '.join(names)}; it sets {' and '.join(given) or 'none'}"
            )
        if self.choice is not None and not (len(self.choice) > 0 and all(self.choice)):
            raise ValueError("structured_outputs.choice must have texts, none of them empty")


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the tokens of one request are chosen. Names and meanings are vLLM's.

    A value that is set later is checked when a request is made of it.

    Raises:
        ValueError: a value is out of its range; the message says which range is allowed.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """None: a seed is drawn at admission and kept for the whole request."""
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = 16
    """None: up to the model's maximum length."""
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of most likely tokens reported in addition to the chosen one; -1: all tokens, None: no log probabilities.
    """
    logprob_token_ids: Sequence[int] | None = None
    """The tokens whose log probabilities are reported beside that of the chosen one, however likely they are; None: the
    most likely ones. `logprobs` may then be left out."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens. The whole prompt is computed then, even if it is cached."""
    logit_bias: dict[int, float] = {}
    structured_outputs: StructuredOutputsParams | None = None
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be chosen; None: all. To end early, the output needs an end token among them."""
    bad_words: Sequence[str] | None = None
    """Texts that the output must not contain, if they would be written with the tokens that encoding them gives."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """No effect: the decoders of generating models write special tokens without spaces between them."""
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    """False, and None as in vLLM: outputs have token ids and no text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    truncate_prompt_tokens: int | None = None
    """Keep only that many of the prompt's last tokens; -1: as many as the model takes, None: refuse a longer prompt."""
    logits_processors: Any = None
    """Refused: no code of users runs in the engine."""
    watermarking: bool | None = None
    """Whether the output is marked with the engine's key; None: if it has one."""
    logits_digest: bool = False
    """Report a digest of the fp32 logits of every step: equal digests mean equal bits."""
    receipt: bool = False
    """Give each choice a receipt, see `receipts.receipt.Receipt`, by which `LLM.verify` can check it."""

    def __post_init__(self) -> None:
        try:
            self._resolve_aliases()
            self._check_ranges()
        except (TypeError, AttributeError) as error:
            raise ValueError(wrong_type(self) or str(error)) from error

    def _check_ranges(self) -> None:
        def require(holds: bool, message: str) -> None:
            if not holds:
                raise ValueError(message)

        for name, kind in _TYPES.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(name)
        require(self.n >= 1, f"n must be at least 1, got {self.n}")
        require(0.0 <= self.temperature <= 100.0, f"temperature must be in [0, 100], got {self.temperature}")
        require(0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], got {self.top_p}")
        require(self.top_k >= -1, f"top_k must be -1 or 0 (off) or at least 1, got {self.top_k}")
        require(0.0 <= self.min_p <= 1.0, f"min_p must be in [0, 1], got {self.min_p}")
        require(
            0.0 < self.repetition_penalty <= 100.0,
            f"repetition_penalty must be in (0, 100], got {self.repetition_penalty}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(-2.0 <= value <= 2.0, f"{name} must be in [-2, 2], got {value}")
        require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed must fit in 64 bits")
        require(
            self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"
        )
        require(self.min_tokens >= 0, f"min_tokens must be at least 0, got {self.min_tokens}")
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens ({self.min_tokens}) must not be larger than max_tokens ({self.max_tokens})",
        )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            require(count is None or count >= -1, f"{name} must be at least 0, or -1 for all, got {count}")
        for bias in self.logit_bias.values():
            require(-100.0 <= bias <= 100.0, "logit_bias values must be in [-100, 100]")
        require(all(map(len, self.stop_strings)), "stop strings must not be empty")
        require(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids must not be empty; leave it out to allow all tokens",
        )
        require(
            not isinstance(self.bad_words, str) and all(map(len, self.bad_words or ())),
            "bad_words must be a list of texts, none of them empty",
        )
        require(
            self.detokenize or not self.stop_strings,
            "stop strings are found in the text, so they need detokenize=True; use stop_token_ids",
        )
        require(
            self.truncate_prompt_tokens is None or self.truncate_prompt_tokens == -1 or self.truncate_prompt_tokens > 0,
            f"truncate_prompt_tokens must be -1 or at least 1, got {self.truncate_prompt_tokens}",
        )
        require(
            isinstance(self.structured_outputs, StructuredOutputsParams | None),
            f"structured_outputs must be StructuredOutputsParams or a dict, got {self.structured_outputs!r:.80}",
        )
        require(
            isinstance(self.output_kind, RequestOutputKind),
            f"output_kind must be a RequestOutputKind, got {self.output_kind!r:.80}",
        )
        require(
            not self.logits_processors,
            "logits_processors are not supported: no code of users runs in the engine, whose ranks must agree on every "
            "token; use logit_bias, allowed_token_ids, bad_words or structured_outputs",
        )

    def _resolve_aliases(self) -> None:
        """Give what vLLM's callers may write instead of a default its usual form."""
        for name in ("stop", "stop_token_ids"):
            if getattr(self, name) is None:
                setattr(self, name, ())
        if self.logit_bias is None:
            self.logit_bias = {}
        if self.detokenize is None:
            self.detokenize = False
        if self.seed == -1:
            self.seed = None
        if isinstance(self.structured_outputs, dict):
            self.structured_outputs = StructuredOutputsParams(**self.structured_outputs)
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(getattr(self, name), bool):
                setattr(self, name, 1 if getattr(self, name) else None)

    @classmethod
    def from_optional(cls, *, max_tokens: int | None = 16, **values: Any) -> SamplingParams:
        """The same, where None stands for the default of every value but `max_tokens`."""
        return cls(max_tokens=max_tokens, **{name: value for name, value in values.items() if value is not None})

    def clone(self) -> SamplingParams:
        """A copy that can be changed on its own."""
        return copy.deepcopy(self)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, also if `stop` is one string."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_TYPES: dict[str, Any] = {
    "n": int,
    "logprob_token_ids": Sequence | None,
    "detokenize": bool,
    "truncate_prompt_tokens": int | None,
    "receipt": bool,
}
"""Of values that no comparison and no engine finds to be of a wrong type: they stay in the front."""


def wrong_type(params: msgspec.Struct) -> str:
    """What a value of a wrong type should be, for the first one that has one; empty: all types are right."""
    for field in msgspec.structs.fields(params):
        value = getattr(params, field.name)
        try:
            if not isinstance(value, enum.Enum):
                msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            return f"{field.name} has a wrong type: {error}"
    return ""
