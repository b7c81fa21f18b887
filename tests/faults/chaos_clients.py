"""What the clients of tests/faults/chaos.py ask through the `openai` package, and their answers as one text."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import httpx
import openai

_STREAM = {"model": "demo", "stream": True, "stream_options": {"include_usage": True}}
_WHOLE = _STREAM | {"extra_body": {"ignore_eos": True}}
REQUESTS: tuple[dict[str, Any], ...] = (
    {**_WHOLE, "prompt": "The first thing that", "max_tokens": 300, "temperature": 0.8, "seed": 7},
    {**_WHOLE, "prompt": "In the morning", "max_tokens": 120, "n": 2, "seed": 3, "logprobs": 2},
    {**_WHOLE, "prompt": "A list of", "max_tokens": 200, "temperature": 0, "frequency_penalty": 0.5},
    {**_STREAM, "prompt": "She said", "max_tokens": 250, "seed": 11, "stop": ["zz", "qu"]},
)
UNSEEDED: dict[str, Any] = {**_WHOLE, "prompt": "Once upon a time", "max_tokens": 200, "temperature": 1.0}


class Busy(Exception):
    """The server takes no requests at present."""


class Failed(Exception):
    """A stream ended with an error."""


def connect(url: str) -> openai.OpenAI:
    """A client that tries nothing again by itself, so that each error of the server is seen."""
    # The package takes this client too, but its types name only that of httpx2.
    http: Any = httpx.Client(timeout=60.0, limits=httpx.Limits(max_connections=64, max_keepalive_connections=0))
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)


def ask(client: openai.OpenAI, request: dict[str, Any], on_piece: Callable[[], None]) -> str:
    """The whole answer to a request, in a form that does not depend on how it was cut into pieces.

    Raises:
        Busy: no replica ran when the request came.
        Failed: the stream ended with an error.
    """
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "logprobs": [], "finish": None})
    usage = None
    try:
        with client.completions.create(**request) as stream:
            for piece in stream:
                on_piece()
                usage = piece.usage or usage
                for choice in piece.choices:
                    found = choices[choice.index]
                    found["text"] += choice.text
                    found["finish"] = choice.finish_reason or found["finish"]
                    if choice.logprobs:
                        found["logprobs"] += choice.logprobs.token_logprobs or []
    except openai.APIStatusError as error:
        if error.status_code in (429, 503):
            raise Busy from None
        raise Failed(str(error)) from None
    except (openai.APIError, httpx.HTTPError) as error:
        raise Failed(f"{type(error).__name__}: {error}") from None
    if usage is None:
        raise Failed("the stream ended early")
    return json.dumps({"choices": choices, "usage": usage.model_dump()}, sort_keys=True)
