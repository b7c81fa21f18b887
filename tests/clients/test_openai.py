"""The official client."""

from __future__ import annotations

import base64
import json
from array import array

import httpx
import openai
import pytest

from tests.clients.forms import ANSWER, FIND, MESSAGES, QUESTION, Person
from tests.e2e.serving import Server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").object == "model"


def test_the_page_is_installed_too(server: Server) -> None:
    assert "Shardline" in httpx.get(f"{server.url}/").text
    assert httpx.get(f"{server.url}/ui/app.js").status_code == 200


def test_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, logprobs=True)
    [choice] = whole.choices
    assert ANSWER in choice.message.content
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(choice.message.content[:10])
    with client.chat.completions.stream(model="demo", messages=MESSAGES, temperature=0) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert deltas == final.choices[0].message.content == choice.message.content


def test_chat_parse(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="demo", messages=MESSAGES, response_format=Person, seed=seed, max_tokens=200
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
    with client.chat.completions.stream(
        model="demo", messages=MESSAGES, response_format=Person, temperature=0, max_tokens=200
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


def test_chat_tools(client: openai.OpenAI) -> None:
    strict = {**FIND, "function": {**FIND["function"], "strict": True}}
    asked = {"model": "demo", "messages": MESSAGES, "tools": [strict], "temperature": 0, "parallel_tool_calls": False}
    whole = client.chat.completions.create(tool_choice="required", **asked)
    call = whole.choices[0].message.tool_calls[0]
    assert whole.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "find_module"
    assert isinstance(json.loads(call.function.arguments)["topic"], str)
    with client.chat.completions.stream(tool_choice="required", **asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert streamed.function.arguments == call.function.arguments
    assert streamed.function.parsed_arguments == json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "os.path"}
    conversation = [*MESSAGES, whole.choices[0].message, result]
    assert client.chat.completions.create(**{**asked, "messages": conversation}).choices[0].message


def test_completions(client: openai.OpenAI) -> None:
    asked = {"model": "demo", "prompt": "os.path.join:", "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(logprobs=2, echo=True, **asked)
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **asked))
    assert whole.choices[0].text == asked["prompt"] + text
    assert whole.choices[0].logprobs.token_logprobs[0] is None


def test_responses(client: openai.OpenAI) -> None:
    asked = {"model": "demo", "input": QUESTION, "temperature": 0}
    first = client.responses.create(**asked)
    assert ANSWER in first.output_text
    with client.responses.stream(**asked) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert deltas == stream.get_final_response().output_text == first.output_text
    second = client.responses.create(previous_response_id=first.id, **asked)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_parse(client: openai.OpenAI) -> None:
    asked = {"model": "demo", "input": QUESTION, "temperature": 0, "max_output_tokens": 200}
    assert isinstance(client.responses.parse(text_format=Person, **asked).output_parsed, Person)
    tool = {"type": "function", "strict": True, **FIND["function"]}
    answer = client.responses.parse(tools=[tool], tool_choice="required", parallel_tool_calls=False, **asked)
    [call] = [item for item in answer.output if item.type == "function_call"]
    assert isinstance(call.parsed_arguments["topic"], str)


def test_errors_have_the_clients_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="demo", messages=MESSAGES, temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="pooling"):
        client.embeddings.create(model="demo", input="x")


def test_embeddings(pooling_server: Server) -> None:
    client = pooling_server.client()
    floats = client.embeddings.create(model="demo", input=["os.path", "json"], encoding_format="float")
    assert [item.index for item in floats.data] == [0, 1]
    first = floats.data[0].embedding
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-3)
    # Without a format, the client asks for base64 and decodes it.
    assert client.embeddings.create(model="demo", input="os.path").data[0].embedding == pytest.approx(first, abs=1e-6)
    raw = client.embeddings.create(model="demo", input="os.path", encoding_format="base64").data[0].embedding
    assert array("f", base64.b64decode(raw)).tolist() == pytest.approx(first, abs=1e-6)
    assert len(client.embeddings.create(model="demo", input="os.path", dimensions=8).data[0].embedding) == 8
