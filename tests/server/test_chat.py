from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pytest

from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from tests.server.conftest import Running, serve
from tests.server.fake_engine import REPLY
from tests.text.builders import byte_level_json, tokenizer

TOKENIZER = tokenizer(byte_level_json())
MODEL = "demo"
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def test_answers_a_conversation(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
        ],
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint == "sl-fake"
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == REPLY
    assert choice.message.refusal is None
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None


def test_prompt_is_the_rendered_template(shared: Running, http: httpx.Client) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *HI]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "return_token_ids": True, "max_tokens": 2})
    ids = answer.json()["prompt_token_ids"]
    text = "<|bos|><|system|>Be brief.<|end|>\n<|user|>Hi<|end|>\n<|assistant|>"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert shared.engine.requests[-1].prompt_token_ids == ids


def test_takes_its_own_answer_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=HI)  # type: ignore[arg-type]
    again = [*HI, first.choices[0].message, {"role": "user", "content": "And?"}]
    second = client.chat.completions.create(model=MODEL, messages=again)  # type: ignore[arg-type]
    assert second.choices[0].message.content == REPLY


def test_runs_up_to_the_models_length_by_default(shared: Running, http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI, "ignore_eos": True}).json()
    assert answer["usage"]["total_tokens"] == shared.llm.model.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(http: httpx.Client, name: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI, name: 3}).json()
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("n", [1, 2])
def test_stream_has_role_then_content_then_reason_then_usage(client: openai.OpenAI, n: int) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=HI,
            n=n,
            stream=True,
            stream_options={"include_usage": True},  # type: ignore[arg-type]
        )
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for index in range(n):
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert mine[0].delta.content == ""
        assert all(choice.delta.role is None for choice in mine[1:])
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1].delta.content == ""
        text = "".join(choice.delta.content or "" for choice in mine)
        assert text == (f"{index}{REPLY}" if index else REPLY)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: openai.OpenAI, stream: bool) -> None:
    request = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        logprobs=True,
        top_logprobs=2,
        stream=stream,  # type: ignore[arg-type]
    )
    answers: list[Any] = list(request) if stream else [request]
    found: list[Any] = []
    for answer in answers:
        for choice in answer.choices:
            if choice.logprobs is not None:
                found += choice.logprobs.content or []
    raw = b"".join(bytes(entry.bytes or []) for entry in found)
    assert raw.decode() == REPLY + "<|eos|>"
    assert all(len(entry.top_logprobs) == 2 for entry in found)
    assert all(entry.logprob == -0.5 for entry in found)


def test_logprobs_without_top_ones(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, logprobs=True)  # type: ignore[arg-type]
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert content[0].top_logprobs == []


def test_fields_that_the_sdk_sends_are_tolerated(http: httpx.Client) -> None:
    body = {
        "messages": HI, "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True,
        "reasoning_effort": "low", "user": "me", "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"},
        "prompt_cache_key": "k", "safety_identifier": "s", "modalities": ["text"], "verbosity": "low", "stop": None,
        "temperature": None, "max_tokens": None, "top_logprobs": 0, "stream_options": {},
    }  # fmt: skip
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "x" * 65, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [*HI, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"unknown": 1}}, "structured_outputs"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "structured_outputs"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [100_000]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "stop": "x"}, "use_beam_search"),
        ({"use_beam_search": True, "structured_outputs": {"regex": "a"}}, "use_beam_search"),
        ({"use_beam_search": True, "n": 11}, "n"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"messages": [{"role": "user", "content": "x", "colours": [0] * 65_537}]}, "messages"),
        ({"watermarking": True}, "watermarking"),
        ({"watermark": True}, "watermarking"),
        ({"watermark": True, "watermarking": False}, "watermark"),
        ({"watermark": True, "use_beam_search": True}, "use_beam_search"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ messages }}"}}, "chat_template_kwargs"),
        ({"kv_transfer_params": {"prompt_token_ids": []}}, "kv_transfer_params.prompt_token_ids"),
        ({"kv_transfer_params": {"prompt_token_ids": [1] * 10_000}}, "kv_transfer_params.prompt_token_ids"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_refuses_with_the_field(http: httpx.Client, change: dict[str, object], param: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_bound_that_is_exceeded_is_named(http: httpx.Client) -> None:
    for seed, code in ((2**63, "less_than_equal"), (-(2**63) - 1, "greater_than_equal")):
        answer = http.post("/v1/chat/completions", json={"messages": HI, "seed": seed})
        assert answer.json()["error"]["code"] == code


def test_answers_are_marked_if_the_server_has_a_key() -> None:
    """The fields of TGI and of vLLM."""
    key = {"scheme": "kgw", "key_file": "read by the engine only"}
    with serve(engine_config=EngineConfig.from_options(watermark_config=key)) as running, running.http() as other:
        for fields, marked in (
            ({}, True),
            ({"watermark": True}, True),
            ({"watermark": False}, None),
            ({"watermarking": False}, None),
            ({"watermarking": False, "watermark": False}, None),
        ):
            assert other.post("/v1/chat/completions", json={"messages": HI, **fields}).status_code == 200
            assert running.engine.requests[-1].sampling.watermarking is marked


def test_a_prompt_that_another_server_has_rendered(shared: Running, http: httpx.Client) -> None:
    ids = TOKENIZER.encode_text("<|user|>Rendered elsewhere")
    body = {"messages": HI, "kv_transfer_params": {"prompt_token_ids": ids, "do_remote_prefill": True}}
    answer = http.post("/v1/chat/completions", json={**body, "return_token_ids": True, "return_prompt_text": True})
    assert answer.json()["prompt_token_ids"] == ids
    assert answer.json()["prompt_text"] == "<|user|>Rendered elsewhere"
    assert shared.engine.requests[-1].prompt_token_ids == ids
    http.post("/v1/chat/completions", json={**body, "echo": True})
    assert shared.engine.requests[-1].prompt_token_ids != ids


def test_the_text_of_the_prompt_is_in_the_first_chunk(http: httpx.Client) -> None:
    body = {"messages": HI, "return_prompt_text": True, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert events[0]["prompt_text"] == "<|bos|><|user|>Hi<|end|>\n<|assistant|>"
    assert not any("prompt_text" in event for event in events[1:])


def test_other_roles_and_fields_of_messages_are_the_templates_matter(shared: Running, http: httpx.Client) -> None:
    messages = [{"role": "narrator", "content": "x", "colour": 1}]
    answer = http.post("/v1/chat/completions", json={"messages": messages, "return_token_ids": True})
    assert "<|narrator|>x" in TOKENIZER.decode(answer.json()["prompt_token_ids"], skip_special_tokens=False)
    config = ServerConfig(chat_template="{{ messages[0].colour }}{{ messages[0].content }}")
    parts = [{"role": "user", "content": [{"type": "text", "text": "x", "colour": 2}], "colour": 1}]
    with serve(config) as running, running.http() as other:
        assert TOKENIZER.decode(other.post("/tokenize", json={"messages": parts}).json()["tokens"], True) == "1x"


def test_echo_repeats_the_message_that_the_answer_continues(http: httpx.Client) -> None:
    body = {
        "messages": [*HI, {"role": "assistant", "content": "I say: "}],
        "continue_final_message": True,
        "echo": True,
    }
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "I say: " + REPLY
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == "I say: " + REPLY
    last = {"role": "narrator", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    body = {"messages": [*HI, last], "echo": True, "add_generation_prompt": False}
    message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("narrator", "a\nb" + REPLY)
    body = {"messages": HI, "echo": True}
    assert http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == REPLY


def test_the_last_chunk_has_content_and_the_finish_reason(client: openai.OpenAI) -> None:
    chunks: list[Any] = list(client.chat.completions.create(model=MODEL, messages=HI, max_tokens=2, stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 1
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].choices[0].delta.content


def test_what_was_not_asked_for_is_null(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI}).json()
    names: tuple[str, ...] = ("prompt_logprobs", "prompt_token_ids", "service_tier", "kv_transfer_params")
    assert [answer[name] for name in names] == [None] * 4
    assert answer["choices"][0]["token_ids"] is None
    names = ("refusal", "annotations", "audio", "function_call", "reasoning")
    assert [answer["choices"][0]["message"][name] for name in names] == [None] * 5
    answer = http.post("/v1/completions", json={"prompt": "Hi"}).json()
    assert (answer["service_tier"], answer["kv_transfer_params"]) == (None, None)
    [choice] = answer["choices"]
    assert (choice["prompt_logprobs"], choice["prompt_token_ids"], choice["token_ids"]) == (None, None, None)


def test_tokens_of_logprobs_may_be_ids(http: httpx.Client) -> None:
    body = {"messages": HI, "logprobs": "true", "return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert tokens == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


def test_fields_of_other_engines_are_taken_and_named(http: httpx.Client) -> None:
    """vllm-router adds the first four to every chat request."""
    sent = {"no_stop_trim": False, "stream_reasoning": True, "return_hidden_states": False, "rid": "a", "store": None}
    body = {"messages": HI, "separate_reasoning": True, "top_k": 3, **sent}
    for stream in (False, True):
        answer = http.post("/v1/chat/completions", json={**body, "stream": stream})
        assert answer.status_code == 200, answer.text
        named = set(answer.headers["x-shardline-ignored"].split(", "))
        assert named == {"no_stop_trim", "stream_reasoning", "return_hidden_states", "rid"}
    plain = http.post("/v1/chat/completions", json={"messages": HI})
    assert "x-shardline-ignored" not in plain.headers
    assert http.post("/v1/chat/completions", json={"messages": HI, "colour": 1}).status_code == 400


def test_the_grammar_reaches_the_engine(shared: Running, http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a+"}},
        {"regex": "a+"},
        {"guided_regex": "a+"},
        {"guided_json": schema, "guided_whitespace_pattern": " *"},
        {"guided_choice": ["a", "b"], "guided_decoding_backend": "outlines"},
        {"guided_grammar": 'root ::= "a"'},
    ]
    for form in forms:
        assert http.post("/v1/chat/completions", json={"messages": HI, **form}).status_code == 200
        constraints = shared.engine.requests[-1].constraints
        assert constraints is not None
        assert constraints.grammar
    assert http.post("/v1/chat/completions", json={"messages": HI, "bad_words": ["x"]}).status_code == 200
    banned = shared.engine.requests[-1].constraints
    assert banned is not None
    assert banned.bad_words
    http.post("/v1/chat/completions", json={"messages": HI})
    assert shared.engine.requests[-1].constraints is None


def test_a_path_may_end_with_a_slash(http: httpx.Client) -> None:
    assert http.post("/v1/chat/completions/", json={"messages": HI}).status_code == 200
    assert http.get("/health/").status_code == 200


def test_the_last_tokens_of_a_prompt_can_be_kept(shared: Running, http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json={"messages": HI, "truncate_prompt_tokens": 3})
    assert len(shared.engine.requests[-1].prompt_token_ids) == 3
    most = shared.llm.model.max_model_len
    for body in ({"messages": [{"role": "user", "content": "ab " * most}]}, {"prompt": "ab " * most}):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        assert http.post(path, json={**body, "truncate_prompt_tokens": -1}).status_code == 200
        assert len(shared.engine.requests[-1].prompt_token_ids) == most - 1
        error = http.post(path, json=body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {most} tokens" in error["message"]


def test_constrained_answers_that_must_not_show_reasoning_have_none() -> None:
    with serve(ServerConfig(reasoning_parser="qwen3")) as running, running.http() as http:
        body = {"messages": HI, "structured_outputs": {"regex": "a+"}}
        for shown in (True, False):
            path = "/v1/chat/completions/render"
            rendered = http.post(path, json={**body, "include_reasoning": shown}).json()
            assert rendered["reasoning_ended"] is not shown
            assert ("<think>" in rendered["sampling_params"]["structured_outputs"]["grammar"]) is shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        {"messages": [1] * 300_000},
        {"messages": HI, "stop": [1] * 300_000},
        {"messages": HI, "tools": [1] * 300_000},
        {"messages": [{"role": "user", "content": [1] * 300_000}]},
        {"messages": HI, "logit_bias": dict.fromkeys(map(str, range(300_000)), "x")},
        {"messages": HI, "structured_outputs": {"json": {"type": ["x"] * 300_000}}},
        {"messages": [{"role": "user", "content": "a " * 3_000_000}]},
        {"messages": HI, "allowed_token_ids": [1] * 300_000},
        {"messages": HI, "structured_outputs": {"choice": ["ab"] * 200_000}},
        {"messages": HI, "structured_outputs": {"json": "[" + "1," * 2_000_000 + "1]"}},
    ],
    ids=["messages", "stop", "tools", "content", "logit_bias", "schema", "prompt", "allowed", "choice", "json"],
)  # fmt: skip
def test_hostile_bodies_are_refused_at_the_first_fault(http: httpx.Client, body: dict[str, object]) -> None:
    started = time.process_time()
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert time.process_time() - started < 2
    assert len(answer.content) < 2000


def test_another_template() -> None:
    config = ServerConfig(chat_template="{{ eos_token }}{{ messages[-1].content }} {{ mood }}")
    with serve(config) as running, running.http() as http:
        body = {"messages": HI, "chat_template_kwargs": {"mood": "gay"}}
        answer = http.post("/tokenize", json=body).json()
        assert TOKENIZER.decode(answer["tokens"], skip_special_tokens=False) == "<|eos|>Hi gay"


def test_a_request_may_bring_a_template_if_it_is_trusted() -> None:
    config = ServerConfig(trust_request_chat_template=True)
    with serve(config) as running, running.http() as http:
        body = {"messages": HI, "chat_template": "{{ eos_token }}{{ messages[-1].content }} {{ mood }}"}
        answer = http.post("/tokenize", json={**body, "chat_template_kwargs": {"mood": "gay"}}).json()
        assert TOKENIZER.decode(answer["tokens"], skip_special_tokens=False) == "<|eos|>Hi gay"
        answer = http.post("/tokenize", json={"messages": HI})
        assert "<|user|>Hi" in TOKENIZER.decode(answer.json()["tokens"], skip_special_tokens=False)
        answer = http.post("/v1/chat/completions", json={"messages": HI, "chat_template": "{% if %}"})
        assert answer.status_code == 400
        assert "broken" in answer.json()["error"]["message"]


def test_the_template_sees_the_effort() -> None:
    config = ServerConfig(chat_template="{{ reasoning_effort }} {{ enable_thinking }}")
    with serve(config) as running, running.http() as http:
        for sent, seen in (
            ({"reasoning_effort": "none"}, "none False"),
            ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "high False"),
            ({"reasoning_effort": "low"}, "low True"),
        ):
            answer = http.post("/v1/chat/completions", json={"messages": HI, "return_prompt_text": True, **sent})
            assert answer.json()["prompt_text"] == seen
            assert "x-shardline-ignored" not in answer.headers
        assert http.post("/v1/chat/completions", json={"messages": HI, "reasoning_effort": "x"}).status_code == 400


def test_a_template_that_refuses_is_a_400() -> None:
    with serve(ServerConfig(chat_template="{{ raise_exception('no users') }}")) as running, running.http() as http:
        answer = http.post("/v1/chat/completions", json={"messages": HI})
        assert answer.status_code == 400
        assert "no users" in answer.json()["error"]["message"]


@pytest.mark.parametrize("template", ["{% if %}", "/nowhere/template.jinja"])
def test_a_broken_template_is_refused_at_start(template: str) -> None:
    from shardline.server.app import create_app
    from tests.server.fake_engine import fake_llm

    llm, engine = fake_llm()
    with pytest.raises(ValueError, match="template"):
        create_app(llm, ServerConfig(chat_template=template))
    engine.close()


def test_template_variables_may_have_any_name(http: httpx.Client) -> None:
    names = ("self", "template", "tokenize", "has_tools", "values", "variables", "special_tokens")
    kwargs = dict.fromkeys(names, 1)
    answer = http.post("/v1/chat/completions", json={"messages": HI, "chat_template_kwargs": kwargs})
    assert answer.status_code == 200, answer.text
