"""/v1/responses through the server and the official client, with invented answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response

from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.server.openai.responses.store import ResponseStore
from tests.server.conftest import Running, serve
from tests.server.test_tools import CALLS, FOUND, TEMPLATE

TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
    for name in ("weather", "time")
]


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with serve(ServerConfig(chat_template=TEMPLATE, reasoning_parser="deepseek_v3")) as running:
        yield running


def last_prompt(running: Running) -> str:
    ids = running.engine.requests[-1].prompt_token_ids
    return running.engine.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_whole_answer(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "<think>Hm.</think>Hello."
    answer = client.responses.create(model="demo", instructions="Be kind.", input="Hi", metadata={"a": "b"})
    assert answer.output_text == "Hello."
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "Hm."  # type: ignore[union-attr, index]
    assert (answer.status, answer.metadata, answer.error) == ("completed", {"a": "b"}, None)
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert last_prompt(shared).endswith("<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>")


def test_an_empty_answer_has_a_message_whose_text_has_a_delta(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = ""
    events = list(client.responses.create(model="demo", input="Hi", stream=True))
    kinds = [event.type.removeprefix("response.") for event in events[2:]]
    assert kinds == [
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == [""]


def test_the_events_of_a_stream_come_in_order(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = f"<think>Hm.</think>{CALLS}"
    shared.engine.seconds_per_token = 0.002
    with client.responses.stream(model="demo", input="Hi", tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    shared.engine.seconds_per_token = 0.0
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    once = [name for index, name in enumerate(names) if not (name.endswith("delta") and names[index - 1] == name)]
    call = ["output_item.added", *(f"function_call_arguments.{part}" for part in ("delta", "done")), "output_item.done"]

    def texts(kind: str) -> list[str]:
        parts = ("content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done")
        return ["output_item.added", *parts, "output_item.done"]

    assert once == [
        *("created", "in_progress"),
        *texts("reasoning_text"),
        *texts("output_text"),
        *call,
        *call,
        "completed",
    ]
    calls = [item for item in final.output if item.type == "function_call"]
    assert [(item.name, item.arguments) for item in calls] == FOUND
    assert final.output_text == "I look."
    whole = client.responses.create(model="demo", input="Hi", tools=TOOLS)
    assert strip_ids(whole) == strip_ids(final)


def strip_ids(response: Response) -> list[Any]:
    drop = {"id", "call_id", "parsed", "parsed_arguments"}
    items = [item.model_dump(exclude=drop) for item in response.output]
    for item in items:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return items


def test_turns_are_kept(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = f"<think>Hm.</think>{CALLS}"
    first = client.responses.create(model="demo", input="Hi", instructions="Only now.", tools=TOOLS)
    shared.engine.reply = "It rains."
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"{index} degrees"}
        for index, item in enumerate(item for item in first.output if item.type == "function_call")
    ]
    second = client.responses.create(model="demo", input=outputs, previous_response_id=first.id, tools=TOOLS)
    prompt = last_prompt(shared)
    assert "Only now." not in prompt
    calls = 'weather={"city": "Köln", "days": {}}time={}'
    assert f"<|user|>Hi<|end|><|assistant|>I look.{calls}<|end|><|tool|>0 degrees<|end|><|tool|>1 degrees" in prompt
    client.responses.delete(first.id)
    third = client.responses.create(model="demo", input="Thanks", previous_response_id=second.id)
    assert "1 degrees<|end|><|assistant|>It rains.<|end|><|user|>Thanks" in last_prompt(shared)
    assert client.responses.retrieve(third.id) == third
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="not found"):
            call(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="demo", input="Hi", previous_response_id=first.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_output_items_can_be_sent_back(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = f"<think>Hm.</think>{CALLS}"
    first = client.responses.create(model="demo", input="Hi", tools=TOOLS, store=False)
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, *first.output]
    client.responses.create(model="demo", input=[*items, {"role": "user", "content": "Go on"}])
    assert "<|assistant|>I look.weather=" in last_prompt(shared)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_form_of_the_text(shared: Running, client: openai.OpenAI) -> None:
    class Person(pydantic.BaseModel):
        name: str

    shared.engine.reply = '{"name": "Ada"}'
    answer = client.responses.parse(model="demo", input="Who?", text_format=Person)
    assert answer.output_parsed == Person(name="Ada")
    constraints = shared.engine.requests[-1].constraints
    assert constraints is not None
    assert '"name"' in constraints.grammar


def test_a_cut_answer_is_incomplete(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "Hello, world."
    answer = client.responses.create(model="demo", input="Hi", max_output_tokens=2)
    assert (answer.status, answer.output[-1].status) == ("incomplete", "incomplete")  # type: ignore[union-attr]
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(model="demo", input="Hi", max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"


def test_functions_of_a_namespace(shared: Running, client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "namespace", "name": "sky", "description": "Above.", "tools": TOOLS}]
    shared.engine.reply = '<tool_call>\n{"name": "sky__weather", "arguments": {}}\n</tool_call>'
    answer = client.responses.create(model="demo", input="Hi", tools=tools)
    [call] = answer.output
    assert call.type == "function_call"
    assert (call.namespace, call.name) == ("sky", "weather")
    assert last_prompt(shared).startswith("sky__weather sky__time ")
    events = list(client.responses.create(model="demo", input="Hi", tools=tools, stream=True))
    items = [event.item for event in events if event.type == "response.output_item.added"]
    assert [(item.namespace, item.name) for item in items] == [("sky", "weather")]  # type: ignore[union-attr]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    chosen: Any = {"type": "function", "name": "time"}
    before: Any = call.model_dump()
    client.responses.create(model="demo", input=[before, output], tools=tools, tool_choice=chosen)
    assert "sky__weather={}" in last_prompt(shared)
    constraints = shared.engine.requests[-1].constraints
    assert constraints is not None
    assert "sky__time" in constraints.grammar
    assert "sky__weather" not in constraints.grammar
    twice = [*tools, {**tools[0], "name": "sea"}]
    with pytest.raises(openai.BadRequestError, match="choose one of sky__time, sea__time"):
        client.responses.create(model="demo", input="Hi", tools=twice, tool_choice=chosen)


def test_what_the_model_reads_and_writes_can_be_seen(shared: Running) -> None:
    shared.engine.reply = "<think>Hm.</think>Hello."
    with shared.http() as http:
        body = {"input": "Hi", "enable_response_messages": True, "include_reasoning": False}
        answer = http.post("/v1/responses", json=body).json()
    [read], [written] = answer["input_messages"], answer["output_messages"]
    assert read == {"type": "raw_message_tokens", "message": last_prompt(shared), "tokens": read["tokens"]}
    assert read["tokens"] == shared.engine.requests[-1].prompt_token_ids
    assert written["message"] == "<think>Hm.</think>Hello."
    assert [item["type"] for item in answer["output"]] == ["message"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_a_prompt_that_is_too_long_can_be_cut_off(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "Ok."
    text = "word " * 600 + "end"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(model="demo", input=text)
    answer = client.responses.create(model="demo", input=text, truncation="auto", max_output_tokens=9)
    assert answer.truncation == "auto"
    assert len(shared.engine.requests[-1].prompt_token_ids) == 503
    assert last_prompt(shared).endswith("end<|end|><|assistant|>")


def test_a_message_that_is_in_progress_goes_on(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "lo."
    begun: list[Any] = [
        {"role": "user", "content": "Hi"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "incomplete",
            "content": [{"type": "output_text", "text": "Hel", "annotations": []}],
        },
    ]
    client.responses.create(model="demo", input=begun)
    assert last_prompt(shared).endswith("<|assistant|>Hel")


def test_the_effort_reaches_the_template() -> None:
    template = "{{ reasoning_effort }} {{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with serve(ServerConfig(chat_template=template)) as running, running.openai() as client:
        client.responses.create(model="demo", input="Hi", reasoning={"effort": "high"})
        assert last_prompt(running) == "high TrueHi"
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hi"}], reasoning_effort="none"
        )
        assert last_prompt(running) == "none FalseHi"
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Hi"}],
            reasoning_effort="low",
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        assert last_prompt(running) == "low FalseHi"


def test_logprobs_belong_to_the_text(shared: Running, client: openai.OpenAI) -> None:
    shared.engine.reply = "<think>Hm.</think>Hello."
    answer = client.responses.create(model="demo", input="Hi", include=["message.output_text.logprobs"], top_logprobs=2)
    [part] = answer.output[1].content  # type: ignore[union-attr, misc]
    logprobs = part.logprobs or []  # type: ignore[union-attr]
    assert "".join(entry.token for entry in logprobs) == "Hello.<|eos|>"
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


def test_a_stream_that_fails_says_so() -> None:
    ends = EngineConfig.from_options(on_failure="exit")
    with serve(engine_config=ends) as running, running.openai() as client:
        running.engine.die_after_steps = 3
        events = list(client.responses.create(model="demo", input="Hi", stream=True))
        assert events[-1].type == "response.failed"
        assert events[-1].response.error is not None
        assert "rank 1 was killed" in events[-1].response.error.message


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"reasoning": {"effort": ["much"]}}, "reasoning.effort"),
        ({"thinking_token_budget": "much"}, "thinking_token_budget"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{}] * 1025}]}, "tools[0].tools"),
        ({"truncation": "auto", "truncate_prompt_tokens": 3}, "truncation"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "web_search", "search_context_size": "low"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "unknown"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "all", "tools": []}},
            "tool_choice.allowed_tools",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
    ],
)
def test_refuses_with_the_field(shared: Running, change: dict[str, Any], param: str) -> None:
    with shared.http() as http:
        answer = http.post("/v1/responses", json={"input": "Hi", **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_the_store_is_bounded() -> None:
    store = ResponseStore(100)
    for index in range(10):
        store.add_response(f"r{index}", b"a" * 20, b"i" * 20, f"r{index - 1}" if index % 2 else None)
        assert store.num_bytes <= 100
    assert store.find_answer("r0") is None
    assert store.find_items("r9") == [b"i" * 20, b"i" * 20]
    store.add_response("large", b"a" * 101, b"", None)
    assert store.find_answer("large") is None
    assert store.find_answer("r9") is not None, "an answer that is too large harms no other"


def test_a_deleted_response_leaves_its_turn_to_its_continuations() -> None:
    store = ResponseStore(1000)
    store.add_response("a", b"aa", b"1", None)
    store.add_response("b", b"bb", b"2", "a")
    store.add_response("c", b"cc", b"3", "b")
    assert store.delete_response("a")
    assert store.delete_response("b")
    assert not store.delete_response("b")
    assert store.find_items("c") == [b"1", b"2", b"3"]
    assert store.num_bytes == 5
    store.delete_response("c")
    assert store.num_bytes == 0
    store.add_response("d", b"dd", b"4", "gone")
    assert len(store) == 0
