"""docs/api.md names every field, and every parameter of the official client."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from openai.resources.responses import Responses

from shardline.server.openai.chat.request import ChatRequest
from shardline.server.openai.completions.request import CompletionRequest
from shardline.server.openai.ignored_fields import IgnoredFields
from shardline.server.openai.responses.request import ResponsesRequest

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
OPTIONS_OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


def named(*rows: str) -> set[str]:
    """The fields in these rows of the table."""
    found = set()
    for row in rows:
        [cells] = re.findall(rf"^\| {row} \| (.*) \|$", PAGE, re.MULTILINE)
        found |= set(re.findall(r"`([a-z_]+)`", cells))
    return found


def test_every_field_of_a_chat_is_documented() -> None:
    rows = ("taken by both", "taken by chats only", "ignored by both", "refused by both", "refused by chats")
    assert named(*rows) == set(ChatRequest.model_fields)


def test_every_field_of_a_completion_is_documented() -> None:
    rows = (
        "taken by both",
        "taken by completions only",
        "ignored by both",
        "refused by both",
    )
    assert named(*rows) == set(CompletionRequest.model_fields)


def test_every_field_of_a_response_is_documented() -> None:
    rows = ("taken", "ignored", "refused")
    of_both = named("taken by both", "ignored by both", "refused by both")
    assert set(ResponsesRequest.model_fields) - of_both <= named(*rows) <= set(ResponsesRequest.model_fields)


def test_ignored_fields_are_documented() -> None:
    assert named("ignored by both") == set(IgnoredFields.model_fields)


def test_every_parameter_of_the_official_client_is_known() -> None:
    for call, model in (
        (ChatCompletions.create, ChatRequest),
        (Completions.create, CompletionRequest),
        (Responses.create, ResponsesRequest),
    ):
        assert set(inspect.signature(call).parameters) - OPTIONS_OF_THE_CLIENT <= set(model.model_fields)
