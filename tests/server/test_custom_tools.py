"""Custom tools, and choices among several tools, with invented answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from shardline.config.server import ServerConfig
from tests.server.conftest import Running, serve
from tests.server.test_responses import last_prompt
from tests.server.test_tools import HI, TEMPLATE, TOOLS

CALL = '<tool_call>\n{"name": "sql", "arguments": {"input": "SELECT \\"é\\""}}\n</tool_call>'
CUSTOM: dict[str, Any] = {"name": "sql", "description": "Runs SQL.", "format": {"type": "text"}}
CHOICE: dict[str, Any] = {"type": "custom", "custom": {"name": "sql"}}


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with serve(ServerConfig(chat_template=TEMPLATE)) as running:
        yield running


@pytest.mark.parametrize("choice", ["auto", CHOICE])
def test_a_chat_calls_a_custom_tool(shared: Running, client: openai.OpenAI, choice: Any) -> None:
    shared.engine.reply = CALL
    tools: list[Any] = [*TOOLS, {"type": "custom", "custom": CUSTOM}]
    request: dict[str, Any] = {"model": "demo", "messages": HI, "tools": tools, "tool_choice": choice}
    message = client.chat.completions.create(**request).choices[0].message
    [call] = message.tool_calls or []
    assert call.type == "custom"
    assert (call.custom.name, call.custom.input) == ("sql", 'SELECT "é"')
    assert "weather time sql" in last_prompt(shared)
    streamed = [
        part
        for chunk in client.chat.completions.create(**request, stream=True)
        for choice in chunk.choices
        for part in choice.delta.model_dump().get("tool_calls") or ()
    ]
    assert (streamed[0]["type"], streamed[0]["custom"]["name"]) == ("custom", "sql")
    assert "".join(part["custom"]["input"] for part in streamed) == 'SELECT "é"'
    client.chat.completions.create(
        model="demo",
        messages=[
            *HI,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "1"},
        ],
    )
    assert 'sql={"input": "SELECT \\"é\\""}' in last_prompt(shared)


def test_a_response_calls_a_custom_tool(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = CALL
    tools: list[Any] = [{"type": "custom", **CUSTOM}]
    choice: Any = {"type": "custom", "name": "sql"}
    answer = client.responses.create(model="demo", input="Hi", tools=tools, tool_choice=choice)
    [item] = answer.output
    assert item.type == "custom_tool_call"
    assert (item.name, item.input) == ("sql", 'SELECT "é"')
    events = list(client.responses.create(model="demo", input="Hi", tools=tools, stream=True))
    kinds = [event.type for event in events]
    assert "response.custom_tool_call_input.delta" in kinds
    [done] = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert done.input == 'SELECT "é"'
    output: Any = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "1"}
    client.responses.create(model="demo", previous_response_id=answer.id, input=[output])
    prompt = last_prompt(shared)
    assert 'sql={"input": "SELECT' in prompt
    assert "<|tool|>1" in prompt


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_tools_are_allowed(shared: Running, client: openai.OpenAI, mode: str) -> None:
    def calls(names: list[str]) -> bool:
        shared.engine.reply = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        client.chat.completions.create(model="demo", messages=HI, tools=TOOLS, tool_choice=choice)
        assert "weather time" in last_prompt(shared), "the model sees all of them"
        flat: Any = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": n} for n in names]}
        own: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
        client.responses.create(model="demo", input="Hi", tools=own, tool_choice=flat)
        [grammar, other] = [
            request.constraints.grammar for request in shared.engine.requests[-2:] if request.constraints
        ]
        assert grammar == other
        return "time" in grammar

    assert calls(["time"])
    assert not calls(["weather"])
    assert calls(["time", "weather"])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "format": {}}}]}, "tools[0]"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "unknown"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}}, "tool_choice.allowed_tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "x"}]}}},
            "tool_choice",
        ),
    ],
)  # fmt: skip
def test_refuses_with_the_field(shared: Running, change: dict[str, Any], param: str) -> None:
    with shared.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": HI, "tools": TOOLS, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
