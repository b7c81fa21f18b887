"""Tool calls and structured outputs of the demo model, which was trained for neither: grammars make them valid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pydantic
import pytest

from shardline import LLM, SamplingParams, StructuredOutputsParams
from tests.e2e.serving import Server, serve
from tests.forks import ForkServer

QUESTION: list[Any] = [{"role": "user", "content": "What does os.path.join do?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]


class Person(pydantic.BaseModel):
    """What a model is asked for."""

    model_config = pydantic.ConfigDict(extra="forbid")  # so that every answer is short

    name: str = pydantic.Field(max_length=10)
    kind: Literal["adult", "child"]
    friends: list[Literal["Ann", "Bob"]] = pydantic.Field(max_length=2)


@pytest.fixture(scope="module")
def server(fork_server: ForkServer) -> Iterator[Server]:
    with serve("-tp", "2", "--enable-auto-tool-choice", "--on-failure", "exit", forks=fork_server) as server:
        yield server


def test_the_parser_is_chosen_from_the_template(server: Server) -> None:
    assert "tool calls: parser hermes, chosen from the chat template" in server.output


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_parse_gives_a_valid_object(server: Server, temperature: float) -> None:
    answer = server.client().chat.completions.parse(
        model="demo", messages=QUESTION, response_format=Person, temperature=temperature, seed=1, max_tokens=300
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_required_call_is_valid(server: Server, choice: Any, temperature: float) -> None:
    options: dict[str, Any] = {
        "model": "demo",
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": choice,
        "temperature": temperature,
        "seed": 4,
        "max_tokens": 300,
        "parallel_tool_calls": False,
    }
    whole = server.client().chat.completions.create(**options).choices[0]
    reason = "tool_calls" if choice == "required" else "stop"  # a named call ends an answer as vLLM's
    assert whole.finish_reason == reason
    assert not whole.message.content
    [call] = whole.message.tool_calls or []
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert set(arguments) == {"city", "unit"}
    else:
        assert choice == "required"
        assert arguments == {}
    with server.client().chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == reason
    [streamed] = final.message.tool_calls or []
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)


def test_tools_do_not_disturb_an_answer_without_calls(server: Server) -> None:
    options: dict[str, Any] = {"model": "demo", "messages": QUESTION, "temperature": 0.0, "max_tokens": 60}
    hidden = server.client().chat.completions.create(**options, tools=TOOLS, tool_choice="none").choices[0]
    plain = server.client().chat.completions.create(**options).choices[0]
    assert hidden.message.content == plain.message.content
    auto = server.client().chat.completions.create(**options, tools=TOOLS).choices[0]
    assert auto.message.content


def test_a_finished_grammar_ends_the_answer_in_spite_of_ignore_eos(server: Server) -> None:
    body = {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": True}
    answer = server.client().completions.create(model="demo", prompt="Is it so?", max_tokens=50, extra_body=body)
    assert answer.choices[0].text in ("yes", "no")
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_that_cannot_go_on_fails_alone(server: Server) -> None:
    body = {"prompt": "x", "structured_outputs": {"regex": "a+"}, "allowed_token_ids": [50]}
    failed = httpx.post(f"{server.url}/v1/completions", json=body)
    assert failed.status_code == 400
    assert failed.json()["error"]["code"] == "answer_refused"
    assert server.client().completions.create(model="demo", prompt="x", max_tokens=2).choices


def test_llm_takes_structured_outputs() -> None:
    params = SamplingParams(
        temperature=1.2,
        seed=3,
        max_tokens=200,
        structured_outputs=StructuredOutputsParams(json=Person.model_json_schema()),
    )
    with LLM("demo") as llm:
        [output] = llm.generate("A person:", params, use_tqdm=False)
        [words] = llm.generate("x", SamplingParams(max_tokens=5, bad_words=["os", "path"]), use_tqdm=False)
        assert Person.model_validate_json(output.outputs[0].text)
        assert words.outputs[0].token_ids
        with pytest.raises(ValueError, match="uniqueItems"):
            llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(json={"uniqueItems": True})))
