"""LiteLLM, as a library and as its users name an OpenAI server: model="openai/NAME"."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from tests.clients.forms import ANSWER, FIND, MESSAGES, Person
from tests.e2e.serving import Server


@pytest.fixture
def asked(base_url: str) -> dict[str, Any]:
    return {"model": "openai/demo", "api_base": base_url, "api_key": "none", "temperature": 0, "max_tokens": 200}


def test_completion(asked: dict[str, Any]) -> None:
    whole = litellm.completion(messages=MESSAGES, **asked)
    assert ANSWER in whole.choices[0].message.content
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **asked))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_tools(asked: dict[str, Any]) -> None:
    asked |= {"messages": MESSAGES, "tools": [FIND], "tool_choice": "required", "parallel_tool_calls": False}
    [call] = litellm.completion(**asked).choices[0].message.tool_calls
    assert call.function.name == "find_module"
    joined = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **asked)))
    assert joined.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def test_structured_output(asked: dict[str, Any]) -> None:
    answer = litellm.completion(messages=MESSAGES, response_format=Person, **asked)
    Person.model_validate_json(answer.choices[0].message.content)
    answer = litellm.completion(messages=MESSAGES, response_format={"type": "json_object"}, **asked)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_text_completion(asked: dict[str, Any]) -> None:
    answer = litellm.text_completion(prompt="os.path.join:", **{**asked, "model": "text-completion-openai/demo"})
    assert answer.choices[0].text


def test_responses(asked: dict[str, Any]) -> None:
    del asked["max_tokens"]
    answer = litellm.responses(input=MESSAGES[0]["content"], **asked)
    assert ANSWER in answer.output[-1].content[0].text


def test_embedding(pooling_server: Server) -> None:
    answer = litellm.embedding(
        model="openai/demo", input=["os.path", "json"], api_base=f"{pooling_server.url}/v1", api_key="none"
    )
    assert len(answer.data) == 2


def test_errors(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=MESSAGES, **{**asked, "temperature": -1})
