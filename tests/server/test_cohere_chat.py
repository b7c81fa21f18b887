"""Cohere's chat API, version 2."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from tests.server.conftest import Running, serve
from tests.server.fake_engine import REPLY
from tests.server.test_tools import TEMPLATE
from tests.text.builders import byte_level_json, tokenizer

TOKENIZER = tokenizer(byte_level_json())
PATH = "/cohere/v2/chat"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"q": {"type": "string"}}}}}


def ask(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post(PATH, json={"messages": HI, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    with http.stream("POST", PATH, json={"messages": HI, "stream": True, **body}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events tell, and its finish reason, as clients of Cohere put it together."""
    content: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for event in events[1:-1]:
        match event["type"], event.get("delta", {}).get("message"):
            case "content-start", new:
                assert event["index"] == len(content)
                content.append(new["content"])
            case "content-delta", new:
                [(kind, text)] = new["content"].items()
                content[event["index"]][kind] += text
            case "tool-call-start", new:
                assert event["index"] == len(calls)
                calls.append(new["tool_calls"])
            case "tool-call-delta", new:
                calls[event["index"]]["function"]["arguments"] += new["tool_calls"]["function"]["arguments"]
            case "content-end", None:
                assert event["index"] == len(content) - 1
            case "tool-call-end", None:
                assert event["index"] == len(calls) - 1
            case other:
                raise AssertionError(other)
    assert (events[0]["type"], events[-1]["type"]) == ("message-start", "message-end")
    assert events[0]["id"] == events[-1]["id"]
    message = {**events[0]["delta"]["message"], "content": content, "tool_calls": calls}
    return {"message": {name: value for name, value in message.items() if value}, **events[-1]["delta"]}


def prompt_of(running: Running) -> str:
    return TOKENIZER.decode(running.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in answer["message"].get("tool_calls", ())]
    message = {**answer["message"], **({"tool_calls": calls} if calls else {})}
    return {**answer, "id": "", "message": message}


def test_answers_a_conversation(shared: Running, http: httpx.Client) -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *HI]
    answer = ask(http, messages=messages, max_tokens=100, connectors=["ignored"])
    assert answer["message"] == {"role": "assistant", "content": [{"type": "text", "text": REPLY}]}
    assert answer["finish_reason"] == "COMPLETE"
    assert prompt_of(shared) == "<|bos|><|system|>Be brief.<|end|>\n<|user|>Hi<|end|>\n<|assistant|>"
    tokens = answer["usage"]["tokens"]
    assert tokens["input_tokens"] == len(shared.engine.requests[-1].prompt_token_ids)
    assert answer["usage"]["billed_units"] == tokens
    assert answer["usage"]["cached_tokens"] <= tokens["input_tokens"]


def test_a_stream_tells_the_whole_answer(http: httpx.Client) -> None:
    events = events_of(http, max_tokens=100)
    assert [event["type"] for event in events[:3]] == ["message-start", "content-start", "content-delta"]
    assert [event["type"] for event in events[-2:]] == ["content-end", "message-end"]
    told, whole = joined(events), ask(http, max_tokens=100)
    for answer in (told, whole):
        answer["usage"].pop("cached_tokens")
    assert {**told, "id": ""} == {**whole, "id": ""}


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"max_tokens": 2}, "MAX_TOKENS"), ({"stop_sequences": ["w"]}, "STOP_SEQUENCE")],
)
def test_says_why_it_stops(http: httpx.Client, change: dict[str, Any], reason: str) -> None:
    body = {"max_tokens": 100, **change}
    assert ask(http, **body)["finish_reason"] == reason
    assert events_of(http, **body)[-1]["delta"]["finish_reason"] == reason


def test_sampling_fields_and_log_probabilities(shared: Running, http: httpx.Client) -> None:
    answer = ask(http, max_tokens=3, k=4, p=0.5, seed=7, temperature=0.3, logprobs=True, frequency_penalty=0.1)
    params = shared.engine.requests[-1].sampling
    assert (params.top_k, params.top_p, params.seed, params.temperature) == (4, 0.5, 7, 0.3)
    assert (params.frequency_penalty, params.logprobs) == (0.1, 0)
    assert len(answer["logprobs"]) == 3
    ids = [token_id for piece in answer["logprobs"] for token_id in piece["token_ids"]]
    assert "".join(piece["text"] for piece in answer["logprobs"]) == TOKENIZER.decode(ids, skip_special_tokens=False)
    assert all(len(piece["logprobs"]) == 1 and piece["logprobs"][0] <= 0 for piece in answer["logprobs"])


def test_calls_and_their_results() -> None:
    with serve(ServerConfig(port=0, chat_template=TEMPLATE)) as running, running.http() as http:
        call = '<tool_call>\n{"name": "find", "arguments": {"q": "%s"}}\n</tool_call>'
        running.engine.reply = "Wait.\n" + call % "x" + "\n" + call % "y"
        answer = ask(http, max_tokens=300, tools=[TOOL])
        assert answer["finish_reason"] == "TOOL_CALL"
        assert answer["message"]["content"][0]["text"].strip() == "Wait."
        calls = answer["message"]["tool_calls"]
        assert [json.loads(one["function"]["arguments"]) for one in calls] == [{"q": "x"}, {"q": "y"}]
        assert [(one["type"], one["function"]["name"]) for one in calls] == [("function", "find")] * 2
        told = joined(events_of(http, max_tokens=300, tools=[TOOL]))
        assert without_ids({**told, "usage": None}) == without_ids({**answer, "usage": None})

        data = [{"type": "document", "document": {"id": "d", "data": {"a": "found"}}}, {"type": "text", "text": "more"}]
        results = [{"role": "tool", "tool_call_id": one["id"], "content": data} for one in calls]
        ask(http, max_tokens=300, tools=[TOOL], messages=[*HI, answer["message"], *results])
        assert '{"id": "d", "data": {"a": "found"}}\nmore' in prompt_of(running)

        ask(http, max_tokens=300, tools=[TOOL], tool_choice="REQUIRED")
        assert running.engine.requests[-1].constraints is not None
        ask(http, max_tokens=300, tools=[TOOL], tool_choice="NONE")
        assert "find" not in prompt_of(running)


def test_thinking_and_plans() -> None:
    template = "{{ thinking }}|{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    config = ServerConfig(port=0, reasoning_parser="qwen3", chat_template=template)
    with serve(config) as running, running.http() as http:
        running.engine.reply = "<think>\nHm.</think>\n\nYes."
        answer = ask(http, max_tokens=200, thinking={"type": "enabled"})
        kinds = [block["type"] for block in answer["message"]["content"]]
        assert kinds == ["thinking", "text"]
        assert answer["message"]["content"][0]["thinking"].strip() == "Hm."
        told = joined(events_of(http, max_tokens=200, thinking={"type": "enabled", "token_budget": 9}))
        assert told["message"] == answer["message"]
        plan = {"role": "assistant", "tool_plan": "I search.", "content": "So."}
        ask(http, max_tokens=200, thinking={"type": "disabled"}, messages=[*HI, answer["message"], plan, *HI])
        assert prompt_of(running).startswith("False|")
        assert "I search.|So." in prompt_of(running)


def test_documents_reach_the_template() -> None:
    template = "{% for d in documents %}{{ d.id }}={{ d.data.text }};{% endfor %}{{ safety_mode }} {{ extra }}"
    with serve(ServerConfig(port=0, chat_template=template)) as running, running.http() as http:
        documents = ["a", {"id": "x", "data": "b"}, {"data": {"text": "c"}}]
        body = {"documents": documents, "safety_mode": "STRICT", "chat_template_kwargs": {"extra": 1}}
        ask(http, max_tokens=9, **body)
        assert prompt_of(running) == "doc_0=a;x=b;doc_2=c;strict 1"


@pytest.mark.parametrize("schema", [None, {"type": "object", "properties": {"a": {"type": "integer"}}}])
def test_the_form_of_the_answer(shared: Running, http: httpx.Client, schema: dict[str, Any] | None) -> None:
    ask(http, max_tokens=9, response_format={"type": "json_object", "json_schema": schema})
    assert shared.engine.requests[-1].constraints is not None
    ask(http, max_tokens=9, response_format={"type": "text", "json_schema": schema})
    assert shared.engine.requests[-1].constraints is None


def test_renders_what_it_would_run(shared: Running, http: httpx.Client) -> None:
    ask(http, max_tokens=5)
    rendered = http.post(PATH + "/render", json={"messages": HI, "max_tokens": 5}).json()
    assert rendered["token_ids"] == shared.engine.requests[-1].prompt_token_ids
    assert rendered["sampling_params"]["max_tokens"] == 5


@pytest.mark.parametrize(
    ("change", "status", "part"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user"}]}, 400, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text only"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "'messages[0].content[0].text'"),
        ({"messages": [{"role": "tool", "content": [{"type": "document"}]}]}, 400, "[0].document'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "tool_calls"),
        ({"tool_choice": "auto"}, 400, "tool_choice"),
        ({"p": 7.0}, 400, "top_p"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"model": "other"}, 404, "other"),
    ],
)
def test_errors_have_the_shape_of_cohere(http: httpx.Client, change: dict[str, Any], status: int, part: str) -> None:
    answer = http.post(PATH, json={"messages": HI, "max_tokens": 5, **change})
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"message"}
    assert part in answer.json()["message"]


def test_errors_outside_the_handlers_have_the_shape_of_cohere(http: httpx.Client) -> None:
    for answer, status in ((http.get(PATH), 405), (http.get(PATH + "/nothing"), 404)):
        assert (answer.status_code, answer.json().keys()) == (status, {"message"})
    assert "error" in http.get("/cohere/v2/chats").json()


def test_a_stream_that_fails_ends_with_an_error() -> None:
    with serve(engine_config=EngineConfig.from_options(on_failure="exit")) as running, running.http() as http:
        running.engine.paused = True
        with http.stream("POST", PATH, json={"messages": HI, "stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert '"message-start"' in next(lines)
            running.engine.die("rank 3 was killed")
            *_, failed, done = lines
        assert done == "data: [DONE]"
        event = json.loads(failed.removeprefix("data: "))
        assert (event["type"], event["delta"]["finish_reason"]) == ("message-end", "ERROR")
        assert "rank 3" in event["delta"]["error"]
