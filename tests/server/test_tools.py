"""Tool calls and reasoning through the server and the official client, with invented answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from shardline.config.server import ServerConfig
from shardline.server.openai.chat.messages import ChatMessage
from shardline.server.openai.chat.tools import Tool, _warn_of_unknown_format
from shardline.text.tokenizer import Tokenizer
from tests.server.conftest import Running, serve

TEMPLATE = (
    "{% for t in tools or () %}{{ t.function.name }} {% endfor %}<tool_call></tool_call>"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or () %}"
    "{{ c.function.name }}={{ c.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}<|assistant|>"
)
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": {}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time"}\n</tool_call>'
)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "time")
]
HI: list[Any] = [{"role": "user", "content": "Hi"}]
FOUND = [("weather", '{"city": "Köln", "days": {}}'), ("time", "{}")]


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    config = ServerConfig(chat_template=TEMPLATE, reasoning_parser="deepseek_v3", enable_auto_tool_choice=True)
    with serve(config) as running:
        yield running


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        ({"name": "f"}, {"name": "f", "description": None, "parameters": None}),
        (
            {"name": "f", "strict": True, "other": 1},
            {"name": "f", "description": None, "parameters": None, "strict": True},
        ),
    ],
)
def test_templates_see_tools_with_the_nulls_of_vllm(function: dict[str, Any], shown: dict[str, Any]) -> None:
    tool = Tool.model_validate({"type": "function", "function": function}).for_template()
    assert json.dumps(tool) == json.dumps({"type": "function", "function": shown})


def stream(client: openai.OpenAI, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """The joined deltas of choice 0, and all chunks."""
    chunks = list(client.chat.completions.create(model="demo", messages=HI, stream=True, **options))
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "ids": []}
    for chunk in chunks:
        for choice in (choice for choice in chunk.choices if choice.index == 0):
            message["content"] += choice.delta.content or ""
            assert getattr(choice.delta, "reasoning", None) == getattr(choice.delta, "reasoning_content", None)
            message["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(message["calls"])
                    assert call.type == "function"
                    assert call.function.name
                    message["ids"].append(call.id)
                    message["calls"].append((call.function.name, ""))
                name, arguments = message["calls"][call.index]
                message["calls"][call.index] = (name, arguments + (call.function.arguments or ""))
            if choice.finish_reason is not None:
                message["finish_reason"] = choice.finish_reason
    return message, chunks


def test_calls_in_a_whole_answer(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = CALLS
    choice: Any
    [choice] = client.chat.completions.create(model="demo", messages=HI, tools=TOOLS).choices
    assert choice.message.content == "I look."
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()] == FOUND
    assert all(call.id.startswith("call_") and call.type == "function" for call in choice.message.tool_calls or ())
    assert choice.finish_reason == "tool_calls"


def test_calls_in_a_stream(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = CALLS
    shared.engine.seconds_per_token = 0.005  # tokens that come at once may leave in one piece
    message, chunks = stream(client, tools=TOOLS, tool_choice="auto")
    shared.engine.seconds_per_token = 0.0
    assert message["content"] == "I look."
    assert message["calls"] == FOUND
    assert len(set(message["ids"])) == 2
    assert message["finish_reason"] == "tool_calls"
    names = [
        chunk for chunk in chunks for c in chunk.choices for call in c.delta.tool_calls or () if call.function.name
    ]
    arguments = [call for chunk in chunks for c in chunk.choices for call in c.delta.tool_calls or () if not call.id]
    assert len(names) == 2
    assert len(arguments) > 5, "arguments are sent as they come"


def test_a_call_ends_reasoning(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = f"<think>\nHm.\n{CALLS.removeprefix('I look.')}"
    [choice] = client.chat.completions.create(model="demo", messages=HI, tools=TOOLS).choices
    message: Any = choice.message
    assert (message.reasoning, message.content, choice.finish_reason) == ("Hm.", None, "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == FOUND
    streamed, _ = stream(client, tools=TOOLS)
    assert (streamed["reasoning"], streamed["calls"], streamed["finish_reason"]) == ("Hm.", FOUND, "tool_calls")
    assert streamed["content"] == ""
    without: Any = client.chat.completions.create(model="demo", messages=HI).choices[0].message
    assert "<tool_call>" in without.reasoning, "no call was offered"


def test_history_with_calls_reaches_the_template(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = CALLS
    first: Any = client.chat.completions.create(model="demo", messages=HI, tools=TOOLS).choices[0].message
    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in first.tool_calls or ()]
    shared.engine.reply = "Done."
    second = client.chat.completions.create(model="demo", messages=[*HI, first, *results], tools=TOOLS)
    assert second.choices[0].message.content == "Done."
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].finish_reason == "stop"
    ids = shared.engine.requests[-1].prompt_token_ids
    prompt = shared.engine.tokenizer.decode(ids, skip_special_tokens=False)
    assert prompt.startswith("weather time ")
    assert 'weather={"city": "Köln", "days": {}}time={}' in prompt
    assert "<|tool|>3" in prompt


@pytest.mark.parametrize("streamed", [False, True])
def test_a_cut_call_ends_with_length(shared: Running, client: openai.OpenAI, streamed: bool) -> None:
    shared.engine.reply = CALLS
    options: dict[str, Any] = {"tools": TOOLS, "max_tokens": 50}
    if streamed:
        message, _ = stream(client, **options)
        assert message["finish_reason"] == "length"
        assert FOUND[0][1].startswith(message["calls"][0][1])
    else:
        [choice] = client.chat.completions.create(model="demo", messages=HI, **options).choices
        assert choice.finish_reason == "length"
        assert FOUND[0][1].startswith((choice.message.tool_calls or [])[0].function.arguments)


def test_one_call_without_parallel_calls(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = CALLS
    answer: Any = client.chat.completions.create(model="demo", messages=HI, tools=TOOLS, parallel_tool_calls=False)
    assert [call.function.name for call in answer.choices[0].message.tool_calls or ()] == ["weather"]
    message, _ = stream(client, tools=TOOLS, parallel_tool_calls=False)
    assert message["calls"] == FOUND[:1]


def test_tool_choice_none_hides_the_tools(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = CALLS
    [choice] = client.chat.completions.create(model="demo", messages=HI, tools=TOOLS, tool_choice="none").choices
    assert choice.message.content == CALLS
    assert choice.finish_reason == "stop"
    prompt = shared.engine.tokenizer.decode(shared.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert "weather" not in prompt


@pytest.mark.parametrize("n", [1, 2])
def test_logprobs_and_ids_of_a_parsed_stream_are_complete(shared: Running, client: openai.OpenAI, n: int) -> None:
    shared.engine.reply = CALLS
    body = {"return_token_ids": True}
    _, chunks = stream(client, tools=TOOLS, logprobs=True, n=n, extra_body=body)
    ids = [i for chunk in chunks for c in chunk.choices if c.index == 0 for i in getattr(c, "token_ids", None) or ()]
    count = sum(len(c.logprobs.content) for k in chunks for c in k.choices if c.index == 0 and c.logprobs)
    assert shared.engine.tokenizer.decode(ids) == CALLS
    assert count == len(ids)


def test_reasoning(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "<think>\nHm, 1+1.\n</think>\n\nTwo."
    answer = client.chat.completions.create(model="demo", messages=HI)
    message = answer.choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == ("Two.", "Hm, 1+1.", "Hm, 1+1.")  # type: ignore[attr-defined]
    details = answer.usage.completion_tokens_details  # type: ignore[union-attr]
    expected = len(shared.engine.tokenizer.encode_text("<think>\nHm, 1+1.\n</think>\n\nTwo."))
    assert details is not None
    assert 0 < (details.reasoning_tokens or 0) < expected
    parts, chunks = stream(client, stream_options={"include_usage": True})
    assert (parts["content"], parts["reasoning"]) == ("Two.", "Hm, 1+1.")
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == details.reasoning_tokens


@pytest.mark.parametrize("shown", [True, False])
def test_an_answer_that_only_reasons_has_no_content(shared: Running, client: openai.OpenAI, shown: bool) -> None:
    shared.engine.reply = "<think>Hm, 1+1."
    body = {"include_reasoning": shown}
    message = client.chat.completions.create(model="demo", messages=HI, extra_body=body).choices[0].message
    assert message.content is None
    assert message.reasoning == ("Hm, 1+1." if shown else None)  # type: ignore[attr-defined]
    sent_back = ChatMessage(role="assistant", content=None, reasoning=message.reasoning)  # type: ignore[attr-defined]
    assert sent_back.for_template()["content"] == "", "templates join texts"


def test_reasoning_can_be_left_out(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "<think>Hm.</think>Two."
    body = {"include_reasoning": False}
    message = client.chat.completions.create(model="demo", messages=HI, extra_body=body).choices[0].message
    assert message.content == "Two."
    assert message.reasoning is None  # type: ignore[attr-defined]
    parts, _ = stream(client, extra_body=body)
    assert (parts["content"], parts["reasoning"]) == ("Two.", "")


def test_left_out_reasoning_is_not_told_by_tokens_either(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "<think>Hm.</think>Two."
    body = {"include_reasoning": False, "return_token_ids": True}
    [choice] = client.chat.completions.create(model="demo", messages=HI, logprobs=True, extra_body=body).choices
    assert (choice.logprobs, choice.token_ids) == (None, None)  # type: ignore[attr-defined]
    parts, chunks = stream(client, logprobs=True, extra_body=body)
    assert parts["content"] == "Two."
    assert not any(choice.logprobs or getattr(choice, "token_ids", None) for c in chunks for choice in c.choices)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_calls_have_empty_content(shared: Running, client: openai.OpenAI, choice: Any) -> None:
    shared.engine.reply = CALLS[CALLS.index("<") :]
    answer = client.chat.completions.create(model="demo", messages=HI, tools=TOOLS, tool_choice=choice).choices[0]
    reason = "tool_calls" if choice == "required" else "stop"
    assert (answer.message.content, answer.finish_reason) == ("", reason)
    message, _ = stream(client, tools=TOOLS, tool_choice=choice)
    assert (message["content"], message["finish_reason"]) == ("", reason)


def test_reasoning_before_calls(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "<think>Maybe <function>.</think>\n" + CALLS
    message, _ = stream(client, tools=TOOLS)
    assert message["reasoning"] == "Maybe <function>."
    assert message["calls"] == FOUND


def test_an_answer_without_reasoning_counts_none(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "Two."
    answer = client.chat.completions.create(model="demo", messages=HI)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0  # type: ignore[union-attr]


def test_an_unmarked_answer_is_reasoning_unless_that_is_forbidden_or_a_form_is_required() -> None:
    """As with vLLM's parser of this name."""
    config = ServerConfig(chat_template=TEMPLATE, reasoning_parser="qwen3")
    with serve(config) as running, running.http() as http:
        running.engine.reply = "two"
        ids = [5, 6, 7]
        for fields, is_reasoning in (
            ({}, True),
            ({"chat_template_kwargs": {"enable_thinking": True, "thinking": False}}, True),
            ({"chat_template_kwargs": {"enable_thinking": False}}, False),
            ({"reasoning_effort": "none"}, False),
            ({"reasoning_effort": "none", "kv_transfer_params": {"prompt_token_ids": ids}}, False),
            ({"kv_transfer_params": {"prompt_token_ids": ids}}, True),
            ({"structured_outputs": {"regex": "[a-z]+"}}, False),
            ({"tools": TOOLS, "tool_choice": "required"}, False),
            ({"tools": TOOLS}, True),
        ):
            answer = http.post("/v1/chat/completions", json={"messages": HI, **fields}).json()
            message = answer["choices"][0]["message"]
            expected = ("two", None) if is_reasoning else (None, "two")
            assert (message["reasoning"], message["content"]) == expected, fields
            counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert (counted > 0) is is_reasoning, fields
        response = http.post("/v1/responses", json={"input": "Hi"}).json()
        assert [item["type"] for item in response["output"]] == ["message"], "clients of blocks read the message"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "unknown"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"messages": [*HI, {"role": "assistant", "tool_calls": [{}]}]}, "messages[1].tool_calls"),
        ({"messages": [{"role": "assistant", "content": "", "annotations": [0] * 65_537}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [0] * 65_537}}}]}, "tools"),
    ],
)
def test_refuses_with_the_field(shared: Running, change: dict[str, Any], param: str) -> None:
    with shared.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": HI, "tools": TOOLS, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_without_a_known_format_answers_have_calls_only_if_they_must(caplog: pytest.LogCaptureFixture) -> None:
    with serve(ServerConfig(chat_template="{{ messages[0].content }}")) as running, running.openai() as client:
        _warn_of_unknown_format.cache_clear()
        for _ in range(2):
            running.engine.reply = '{"name": "weather", "parameters": {}}'
            message = client.chat.completions.create(model="demo", messages=HI, tools=TOOLS).choices[0].message
            assert (message.content, message.tool_calls) == (running.engine.reply, None)
        assert [record.message for record in caplog.records if "--tool-call-parser" in record.message][1:] == []
        assert "--tool-call-parser" in caplog.text
        forced: Any = client.chat.completions.create(model="demo", messages=HI, tools=TOOLS, tool_choice="required")
        assert [call.function.name for call in forced.choices[0].message.tool_calls or ()] == ["weather"]
        assert running.engine.requests[-1].constraints is not None


def test_continues_the_final_message(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "world"
    body = {"continue_final_message": True, "add_generation_prompt": False}
    messages: list[Any] = [*HI, {"role": "assistant", "content": "Hello, "}]
    client.chat.completions.create(model="demo", messages=messages, extra_body=body)
    prompt = shared.engine.tokenizer.decode(shared.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<|assistant|>Hello, ")


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_at_start(name: str) -> None:
    from shardline.server.app import create_app
    from tests.server.fake_engine import fake_llm

    llm, engine = fake_llm()
    with pytest.raises(ValueError, match="there is no"):
        create_app(llm, ServerConfig(**{name: "o1"}))  # type: ignore[arg-type]
    engine.close()


def test_arguments_are_json(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = CALLS
    answer: Any = client.chat.completions.create(model="demo", messages=HI, tools=TOOLS)
    for call in answer.choices[0].message.tool_calls or ():
        json.loads(call.function.arguments)


def test_hidden_reasoning_stands_before_no_required_form(shared: Running, client: openai.OpenAI) -> None:
    """A client that sees no reasoning and asks for a form gets the form from the first token on, as in vLLM."""
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"tools": TOOLS, "tool_choice": "required"},
        {"extra_body": {"regex": "a+"}},
    ]
    for form in forms:
        for shown in (True, False):
            body = {**form.get("extra_body", {}), "include_reasoning": shown}
            client.chat.completions.create(model="demo", messages=HI, **{**form, "extra_body": body})
            constraints = shared.engine.requests[-1].constraints
            assert constraints is not None
            assert ("thoughts" in constraints.grammar) is shown
    shared.engine.reply = "<think>Hm.</think>Hello."
    hidden = client.chat.completions.create(model="demo", messages=HI, extra_body={"include_reasoning": False})
    assert hidden.choices[0].message.content == "Hello."


def test_a_budget_of_reasoning_is_checked(
    shared: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    for budget in (-2, 0.5, True, "3"):
        with pytest.raises(openai.BadRequestError, match="non-negative integer, or -1"):
            client.chat.completions.create(model="demo", messages=HI, extra_body={"thinking_token_budget": budget})
    with pytest.raises(openai.BadRequestError, match="'</think>' is one token"):
        client.chat.completions.create(model="demo", messages=HI, extra_body={"thinking_token_budget": 5})
    own = Tokenizer.token_id
    monkeypatch.setattr(Tokenizer, "token_id", lambda self, text: 300 if text == "</think>" else own(self, text))
    for budget in (-1, 0, 5):
        answer = client.chat.completions.with_raw_response.create(
            model="demo", messages=HI, extra_body={"thinking_token_budget": budget}
        )
        assert "x-shardline-ignored" not in answer.headers
