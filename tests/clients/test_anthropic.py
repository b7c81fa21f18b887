"""Anthropic's client, and what coding agents send with it."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.clients.forms import ANSWER, FIND, MESSAGES, Verdict
from tests.e2e.serving import Server

TOOL = {
    "name": FIND["function"]["name"],
    "description": FIND["function"]["description"],
    "input_schema": FIND["function"]["parameters"],
}


@pytest.fixture
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture
def asked() -> dict[str, Any]:
    # The client has no argument for the temperature any more.
    return {"model": "demo", "max_tokens": 200, "messages": MESSAGES, "extra_body": {"temperature": 0}}


def test_messages(client: anthropic.Anthropic, asked: dict[str, Any]) -> None:
    whole = client.messages.create(**asked)
    [block] = whole.content
    assert ANSWER in block.text
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.content[0].text == block.text
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model="demo", messages=MESSAGES).input_tokens
    for usage in (whole.usage, final.usage):
        # What the prefix cache had, or keeps from now on, is counted apart.
        assert usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens == counted


def test_conversation(client: anthropic.Anthropic, asked: dict[str, Any]) -> None:
    system = [{"type": "text", "text": "Answer.", "cache_control": {"type": "ephemeral"}}]
    first = client.messages.create(system=system, **asked)
    further = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "And json.dumps?"},
    ]
    second = client.messages.create(system=system, **{**asked, "messages": further})
    assert second.content[0].text


def test_tools(client: anthropic.Anthropic, asked: dict[str, Any]) -> None:
    asked |= {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    whole = client.messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    [call] = [block for block in whole.content if block.type == "tool_use"]
    assert call.name == "find_module"
    assert isinstance(call.input["topic"], str)
    with client.messages.stream(**asked) as stream:
        [streamed] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "os.path"}]}
    further = [*MESSAGES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**asked, "messages": further, "tool_choice": {"type": "none"}}).content


def test_parse(client: anthropic.Anthropic, asked: dict[str, Any]) -> None:
    assert isinstance(client.messages.parse(output_format=Verdict, **asked).parsed_output, Verdict)


def test_thinking(client: anthropic.Anthropic, asked: dict[str, Any]) -> None:
    """Agents ask every model to think."""
    whole = client.messages.create(thinking={"type": "adaptive"}, **asked)
    assert whole.content[-1].type == "text"


def test_errors_have_the_clients_types(client: anthropic.Anthropic, asked: dict[str, Any]) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**{**asked, "model": "nobody"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**asked, "max_tokens": -1})
