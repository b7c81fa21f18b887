"""Prompts as users give them, and as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from shardline.api.prompt_embeds import join_parts, rows_of
from shardline.messages.request import PromptEmbeds


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; `prompt` is their text, for display only."""

    prompt_token_ids: Sequence[int]
    prompt: str


class EmbedsPrompt(TypedDict, total=False):
    """A prompt as a tensor [number of tokens, hidden size]; `prompt` is for display only."""

    prompt_embeds: Any
    prompt: str


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids that are known to be integers, with rows of hidden states in place of some of them."""

    token_ids: list[int]
    embeds: PromptEmbeds | None = None
    text: str | None = None
    """For display only."""


Prompt = str | TextPrompt | TokensPrompt | EmbedsPrompt | EncodedPrompt | Sequence[int]

_FORMS = 'a prompt is text, {"prompt": text}, {"prompt_token_ids": ids} or a list of ids'


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list. A string, an object or a list of ids is one prompt.

    Raises:
        ValueError: they are no list, and no prompt.
    """
    if not isinstance(prompts, (Sequence, Mapping, EncodedPrompt)):
        raise ValueError(f"{_FORMS}, or a list of these; got {type_of(prompts)}")
    if isinstance(prompts, (str, Mapping, EncodedPrompt)) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def split_prompt(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    """The text and the ids in a prompt; at least one of them is not None.

    Raises:
        ValueError: the prompt has none of the known forms.
    """
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, EncodedPrompt):
        return prompt.text, prompt.token_ids
    if isinstance(prompt, Mapping):
        unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if not unknown and (text is None or isinstance(text, str)):
            if ids is not None:
                return text, _as_ids(ids)
            if text is not None:
                return text, None
        elif not unknown:
            raise ValueError(f"the text of a prompt must be text; got {type_of(text)}")
    elif isinstance(prompt, Sequence):
        return None, _as_ids(prompt)
    raise ValueError(f"{_FORMS}; got {type_of(prompt)}")


def _as_ids(values: Any) -> list[int]:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise ValueError(f"prompt token ids must be a list of integers; got {type_of(values)}")
    if not set(map(type, values)) <= {int}:
        wrong = next(one for one in values if type(one) is not int)
        raise ValueError(f"prompt token ids must be a list of integers; one is {type_of(wrong)}")
    return list(values)


def type_of(value: Any) -> str:
    """What a value of a wrong type is, for a message; of an array, what would work in its place."""
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(repr, value)) or 'nothing'}"[:200]
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{name}: give its .tolist()" if hasattr(value, "tolist") else name


def read_prompt(prompt: Prompt, embeds_size: int, *, takes_embeds: bool) -> str | EncodedPrompt:
    """The prompt; a text has not been encoded yet. `embeds_size` and `takes_embeds`: see `RequestBuilder`.

    Raises:
        ValueError: the prompt has none of the known forms, or its tensor is refused.
    """
    values: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {}
    if values.get("prompt_embeds") is None:
        text, ids = split_prompt(prompt)
        if ids is not None:
            return EncodedPrompt(ids, text=text)
        assert text is not None
        return text
    if unknown := values.keys() - {"prompt_embeds", "prompt"}:
        raise ValueError(f"a prompt with prompt_embeds cannot have {sorted(unknown)[0]!r} too")
    ids, embeds = join_parts([rows_of(values["prompt_embeds"], embeds_size, enabled=takes_embeds)])
    return EncodedPrompt(ids, embeds, values.get("prompt"))
