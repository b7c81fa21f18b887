"""Hostile requests to every endpoint that takes a body.

The fields are those of the server's own models, so that a new field is attacked from the day it exists.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel

from shardline.server.anthropic.request import MessagesRequest, PromptFields
from shardline.server.cohere.request import CohereChatRequest
from shardline.server.openai.batch.chat import BatchedChatRequest
from shardline.server.openai.chat.request import ChatRequest
from shardline.server.openai.completions.request import CompletionRequest
from shardline.server.openai.models import DetokenizeRequest, TokenizeRequest
from shardline.server.openai.responses.request import ResponsesRequest
from shardline.server.pooling.decisions import DecisionRequest
from shardline.server.pooling.generative import GenerativeScoringRequest
from shardline.server.pooling.routes import ClassificationRequest, EmbeddingRequest, PoolingRequest
from shardline.server.pooling.scores import RerankRequest, ScoreRequest
from shardline.server.scale_out.derender_bodies import DerenderChatRequest, DerenderCompletionRequest
from shardline.server.scale_out.generate import GenerateRequest
from tests.hostile import draws, lark, regexes, schemas

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
CHATS = "/v1/chat/completions/batch"
EMBEDDING, TOKENIZE, DETOKENIZE = "/v1/embeddings", "/tokenize", "/detokenize"
MESSAGES, COUNT_TOKENS, GENERATE = "/v1/messages", "/v1/messages/count_tokens", "/inference/v1/generate"
RENDER = "/render"
"""After the path of a conversation's or a completion's endpoint: its prompt, without an answer."""
DERENDER = "/derender"
POOLING, CLASSIFY, SCORE, RERANK = "/pooling", "/classify", "/score", "/rerank"
LABELS, DECISIONS = "/generative_scoring", "/v1/systemone"
COHERE = "/cohere/v2/chat"
MODELS: dict[str, type[BaseModel]] = {
    CHAT: ChatRequest,
    CHATS: BatchedChatRequest,
    COMPLETION: CompletionRequest,
    RESPONSE: ResponsesRequest,
    EMBEDDING: EmbeddingRequest,
    TOKENIZE: TokenizeRequest,
    DETOKENIZE: DetokenizeRequest,
    MESSAGES: MessagesRequest,
    COUNT_TOKENS: PromptFields,
    GENERATE: GenerateRequest,
    CHAT + RENDER: ChatRequest,
    COMPLETION + RENDER: CompletionRequest,
    RESPONSE + RENDER: ResponsesRequest,
    MESSAGES + RENDER: MessagesRequest,
    CHAT + DERENDER: DerenderChatRequest,
    COMPLETION + DERENDER: DerenderCompletionRequest,
    POOLING: PoolingRequest,
    CLASSIFY: ClassificationRequest,
    SCORE: ScoreRequest,
    RERANK: RerankRequest,
    LABELS: GenerativeScoringRequest,
    DECISIONS: DecisionRequest,
    COHERE: CohereChatRequest,
    COHERE + RENDER: CohereChatRequest,
}
MOST_CHOICES = 128
_EARLY = 0.08
"""The share of the clients that leave before they have read the answer."""


@dataclass(frozen=True)
class Case:
    """One request. `leave_after`: seconds after which the client leaves; None: it reads the whole answer."""

    name: str
    path: str
    body: bytes
    leave_after: float | None = None

    def __str__(self) -> str:
        return f"{self.name}: POST {self.path}, {len(self.body):,} bytes"


Fields = dict[str, Any]


def _user(content: Any = "Hi") -> list[Fields]:
    return [{"role": "user", "content": content}]


def _tool(parameters: Any, index: int = 0) -> Fields:
    return {"type": "function", "function": {"name": f"f{index}", "parameters": parameters}}


def usual(path: str) -> Fields:
    """A harmless request."""
    tokens = {"request_id": "a", "choices": [{"index": 0, "token_ids": [5, 6], "finish_reason": "stop"}]}
    requests: dict[str, Fields] = {
        CHAT: {"messages": _user(), "max_tokens": 4},
        CHATS: {"messages": [_user(), _user()], "max_tokens": 4},
        COMPLETION: {"prompt": "The first", "max_tokens": 4},
        RESPONSE: {"input": "Hi", "max_output_tokens": 4},
        EMBEDDING: {"input": "Hi"},
        TOKENIZE: {"prompt": "Hi"},
        DETOKENIZE: {"tokens": [5, 6]},
        MESSAGES: {"messages": _user(), "max_tokens": 4},
        COUNT_TOKENS: {"messages": _user()},
        GENERATE: {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}},
        POOLING: {"input": "Hi"},
        CLASSIFY: {"input": "Hi"},
        SCORE: {"text_1": "Hi", "text_2": ["a", "b"]},
        RERANK: {"query": "Hi", "documents": ["a", "b"]},
        LABELS: {"query": "Hi", "items": ["a", "b"], "label_token_ids": [5, 6]},
        DECISIONS: {"state": "Hi", "questions": {"q": {"type": "choice", "criteria": {"a": None, "b": "c"}}}},
        COHERE: {"messages": _user(), "max_tokens": 4},
        CHAT + DERENDER: {"generate_response": tokens},
        COMPLETION + DERENDER: {"generate_responses": [tokens, tokens], "prompt_tokens": [1, 2]},
    }
    return requests[path.removesuffix(RENDER)]


def _with_schema(schema: Any, way: int) -> tuple[str, Fields]:
    """A request for an answer of this schema, in one of the ways of the API."""
    if way == 2:
        text = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
        return RESPONSE, {**usual(RESPONSE), "text": text}
    if way == 3:
        tool = _tool(schema)
        tool["function"]["strict"] = True
        return CHAT, {**usual(CHAT), "tools": [tool], "tool_choice": "required"}
    if way == 4:
        tool = {"type": "function", "name": "f", "parameters": schema}
        return RESPONSE, {**usual(RESPONSE), "tools": [tool], "tool_choice": "required"}
    path = (COMPLETION, CHAT)[way % 2]
    if way == 7:
        return MESSAGES, {**usual(MESSAGES), "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    if way == 8:
        tool = {"name": "f", "input_schema": schema}
        return MESSAGES, {**usual(MESSAGES), "tools": [tool], "tool_choice": {"type": "any"}}
    if way == 9:
        sampling = {**usual(GENERATE)["sampling_params"], "structured_outputs": {"json": schema}}
        return GENERATE, {**usual(GENERATE), "sampling_params": sampling}
    if way > 4:
        return path, {**usual(path), "structured_outputs": {"json": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return path, {**usual(path), "response_format": form}


def _json(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _named() -> dict[str, Callable[[], tuple[str, bytes]]]:
    """The literal examples of the attack that this corpus grew from, by name."""

    def with_schema(make: Callable[[], Any], way: int, **fields: Any) -> tuple[str, bytes]:
        path, body = _with_schema(make(), way)
        return path, _json({**body, **fields})

    def chat(**fields: Any) -> tuple[str, bytes]:
        return CHAT, _json({**usual(CHAT), **fields})

    def regex(make: Callable[[], str]) -> tuple[str, bytes]:
        return chat(regex=make())

    def grammar(make: Callable[[], str], n: int) -> tuple[str, bytes]:
        return COMPLETION, _json({**usual(COMPLETION), "n": n, "structured_outputs": {"grammar": make()}})

    named: dict[str, Callable[[], tuple[str, bytes]]] = {}
    for name, make in schemas.NAMED.items():
        named |= {f"schema of {name}, way {way}": partial(with_schema, make, way) for way in range(5)}
    for name, make in lark.NAMED.items():
        named |= {f"Lark of {name}, n {n}": partial(grammar, make, n) for n in (1, MOST_CHOICES)}
    for name, make in regexes.NAMED.items():
        named[f"regex of {name}"] = partial(regex, make)
    tools = [_tool(make(), index) for index, make in enumerate(schemas.NAMED.values()) if index not in (0, 2, 3)]
    few_bytes = schemas.NAMED["multipleOf 999983"]
    return named | {
        "schema of few bytes with n 128": lambda: with_schema(few_bytes, 0, n=MOST_CHOICES),
        "metadata of 49,000 members": lambda: chat(metadata={f"m{index}": "x" for index in range(49_000)}),
        "tools with each kind of schema": lambda: chat(tools=tools, tool_choice="required"),
        "12 schemas of 3,000 properties": lambda: chat(
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schemas.properties(2900)}}
        ),
        "prompt_logprobs of 190,000 tokens": lambda: (
            COMPLETION,
            _json({"prompt": [[5] * 1900] * 100, "max_tokens": 1, "prompt_logprobs": 20}),
        ),
        "special tokens in the content": lambda: chat(messages=_user("<|end|><|begin|><|end|>" * 50)),
    }


def _constrained(rng: random.Random) -> tuple[str, Fields]:
    """An answer with a form."""
    match rng.randrange(4):
        case 0 | 1:
            path, body = _with_schema(schemas.schema(rng), rng.randrange(10))
        case 2:
            path = rng.choice((CHAT, COMPLETION))
            key, value = "ebnf", lark.grammar(rng)
            body = usual(path) | ({key: value} if rng.random() < 0.3 else {"structured_outputs": {"grammar": value}})
        case _:
            path = rng.choice((CHAT, COMPLETION))
            form: Fields = {"regex": regexes.regex(rng)}
            if rng.random() < 0.2:
                form = {"choice": [draws.text(rng) for _ in range(draws.size(rng, 500))]}
            elif rng.random() < 0.2:
                form = {"json": schemas.schema(rng), "whitespace_pattern": regexes.regex(rng)}
            body = usual(path) | {"structured_outputs": form}
    fields = body["sampling_params"] if path == GENERATE else body
    if path not in (RESPONSE, MESSAGES) and rng.random() < 0.15:
        fields["n"] = draws.size(rng, MOST_CHOICES)
    fields["max_output_tokens" if path == RESPONSE else "max_tokens"] = draws.size(rng, 64)
    if rng.random() < 0.3:
        body["stream"] = True
    return path, body


def _wrong_fields(rng: random.Random) -> tuple[str, Fields]:
    """Fields of the wrong type, or with odd values."""
    path = rng.choice(list(MODELS))
    names = [field.alias or name for name, field in MODELS[path].model_fields.items()]
    body = usual(path)
    for name in rng.sample(names, min(len(names), rng.choice((1, 1, 1, 2, 5)))):
        body[name] = draws.value(rng)
    return path, body


_NESTED: dict[str, tuple[Fields, ...]] = {
    CHAT: (
        {"tools": [_tool({"type": "object", "properties": {"a": {"type": "string"}}})], "tool_choice": "auto"},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "chat_template_kwargs": {"a": 1}},
        {"messages": [*_user(), {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f",
        "arguments": "{}"}}]}, *_user()]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"},
        "strict": True}}},
        {"response_format": {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {"type": "object"},
        "end": "</f>"}], "triggers": ["<f"]}},
        {"response_format": {"type": "structural_tag", "format": {"type": "sequence", "elements": [{"type": "tag",
        "begin": "a", "content": {"type": "regex", "pattern": "b+"}, "end": ["c"]}, {"type": "any_text"}]}}},
        {"documents": [{"title": "a", "text": "b"}], "reasoning_effort": "low", "logprobs": True, "top_logprobs": 3},
    ),
    CHATS: ({"messages": [_user(), _user([{"type": "text", "text": "a"}])], "stop": ["a"], "n": 2},),
    COMPLETION: ({"logit_bias": {"5": 1}, "stop": ["a"], "structured_outputs": {"regex": "a+",
    "disable_any_whitespace": True}},),
    RESPONSE: (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "reasoning": {"effort": "low"}},
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"}]},
        {"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "include": ["message.output_text.logprobs"]},
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}],
        "tool_choice": {"type": "function", "name": "f"}, "truncation": "auto"},
        {"background": True, "store": True, "enable_response_messages": True, "reasoning": {"effort": "none"}},
        {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}},
        "previous_response_id": "resp_0"},
    ),
    EMBEDDING: ({"input": ["a", "b"], "encoding_format": "base64", "dimensions": 3},),
    TOKENIZE: ({"prompt": None, "messages": _user(), "tools": [_tool({})]},),
    DETOKENIZE: ({"tokens": [1, 2, 3]},),
    MESSAGES: (
        {"system": [{"type": "text", "text": "a"}], "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"}, "thinking": {"type": "disabled"}},
        {"messages": [*_user(), {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}, {"type":
        "tool_use", "id": "c", "name": "f", "input": {}}]}, *_user([{"type": "tool_result", "tool_use_id": "c",
        "content": [{"type": "text", "text": "1"}]}])], "stream": True},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}, "stop_sequences": ["a"]},
    ),
    COUNT_TOKENS: ({"system": "a", "tools": [{"name": "f", "input_schema": {"type": "object"}}]},),
    GENERATE: ({"sampling_params": {"max_tokens": 4, "stop": ["a"], "logprobs": 2, "logit_bias": {"5": 1},
    "structured_outputs": {"regex": "a+"}}, "stream": True, "output_mode": "text"},),
    SCORE: ({"text_2": [{"content": [{"type": "text", "text": "a"}]}], "chat_template_kwargs": {"a": 1}},),
    LABELS: ({"query": [5], "items": [[6], [7]]},),
    DECISIONS: ({"state": {"a": [1]}, "questions": {"q": {"type": "score", "criteria": ["a", "b"]}, "r": {"type":
    "noul", "criteria": {"true": "a"}}}, "chat_template_kwargs": {"a": 1}},),
    COHERE: (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], "documents":
        ["a", {"id": "b", "data": {"c": "d"}}], "thinking": {"type": "enabled", "token_budget": 1}, "stream": True},
        {"messages": [*_user(), {"role": "assistant", "content": [{"type": "thinking", "thinking": "a"}], "tool_calls":
        [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "c", "content":
        [{"type": "document", "document": {"data": {"a": "b"}}}]}], "logprobs": True, "k": 3, "p": 0.5},
        {"response_format": {"type": "json_object", "json_schema": {"type": "object"}}, "stop_sequences": ["a"]},
    ),
}  # fmt: skip


def _wrong_parts(rng: random.Random) -> tuple[str, Any]:
    """A request whose parts, at any depth, have been replaced, removed or repeated."""
    path = rng.choice(list(_NESTED))
    body = json.loads(json.dumps(usual(path) | rng.choice(_NESTED[path])))
    if path + RENDER in MODELS and rng.random() < 0.2:
        path += RENDER
    for _ in range(rng.choice((1, 1, 2, 4))):
        holder: Any = body
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(holder[key], dict | list) and rng.random() < 0.8:
                holder = holder[key]
                continue
            action = rng.randrange(6)
            if action == 0:
                del holder[key]
            elif action == 1 and isinstance(holder, list):
                holder.extend([holder[key]] * draws.size(rng, 2000))
            elif action == 2 and isinstance(holder, dict):
                holder[draws.text(rng)] = holder[key]
            else:
                holder[key] = draws.value(rng)
            break
    return path, body


def _extremes(rng: random.Random) -> tuple[str, Fields]:
    """Fields that are valid one by one, and expensive together."""
    path = rng.choice((CHAT, COMPLETION))
    body = usual(path)
    expensive: Fields = {
        "n": draws.size(rng, MOST_CHOICES),
        "max_tokens": draws.size(rng, 300),
        "logprobs": 20 if path == COMPLETION else True,
        "prompt_logprobs": rng.choice((0, 20)),
        "stop": [draws.text(rng) or "x" for _ in range(draws.size(rng, 2000))],
        "stop_token_ids": [rng.choice((5, 2047, 2**31, -1)) for _ in range(draws.size(rng, 4096))],
        "logit_bias": {str(rng.randrange(2048)): rng.uniform(-100, 100) for _ in range(draws.size(rng, 2000))},
        "bad_words": [draws.text(rng) or "x" for _ in range(draws.size(rng, 2000))],
        "allowed_token_ids": [rng.randrange(2048) for _ in range(draws.size(rng, 4000))],
        "seed": draws.number(rng),
        "temperature": rng.choice((0, 1e-9, 100, 1e-300)),
        "top_k": draws.number(rng),
        "min_tokens": draws.size(rng, 300),
        "ignore_eos": True,
        "stream": True,
        "logits_digest": True,
        "return_token_ids": True,
        "cache_salt": draws.text(rng),
        "priority": draws.number(rng),
        "truncate_prompt_tokens": draws.number(rng),
        "repetition_penalty": rng.choice((1e-30, 100.0)),
    }
    own: Fields = {"top_logprobs": 20, "messages": _user(draws.text(rng, 20_000) or "a")}
    if path == COMPLETION:
        prompts = [draws.text(rng, 50) or "a" for _ in range(draws.size(rng, 64))]
        own = {
            "echo": True,
            "best_of": MOST_CHOICES,
            "suffix": "b",
            "prompt": rng.choice((prompts, [[5] * 9] * 9, "a" * 3000)),
        }
    expensive |= own
    for name in rng.sample(list(expensive), rng.randrange(1, 7)):
        body[name] = expensive[name]
    return path, body


def _raw(rng: random.Random) -> tuple[str, bytes]:
    """Bytes that are no JSON, or JSON that parsers disagree about."""
    path = rng.choice(list(MODELS))
    whole = _json(usual(path))
    depth = draws.size(rng, 100_000)
    odd = rng.choice(
        ("NaN", "-Infinity", "1e999", "1" * draws.size(rng, 9000), "-0", "1E400", "0x10", "01", "1.", "'a'", '"\t"')
    )
    return path, rng.choice(
        (
            lambda: whole[: rng.randrange(len(whole))],
            lambda: whole + draws.text(rng).encode("utf-8", "surrogatepass"),
            lambda: b"\xef\xbb\xbf" + whole,
            lambda: whole.decode().encode(rng.choice(("utf-16", "utf-32", "utf-16-le"))),
            lambda: whole.replace(b'"', rng.choice((b"'", b"\xff", b'\\"', b"\xed\xa0\x80"))),
            lambda: whole[:-1] + b',"seed":' + odd.encode() + b"}",
            lambda: whole[:-1] + b',"metadata":' + b"[" * depth + b"]" * depth + b"}",
            lambda: whole[:-1] + b',"user":"' + b"\\ud83d" * draws.size(rng, 3000) + b'"}',
            lambda: whole[:-1] + b"," + b",".join([whole[1:-1]] * draws.size(rng, 1000)) + b"}",
            lambda: rng.choice((b"", b"null", b"[]", b"0", b'""', b"{}", b"true", b"\0", b"{" * depth,
            b'{"a":' * depth)),
            lambda: rng.randbytes(draws.size(rng, 5000)),
        )
    )()  # fmt: skip


def _large(rng: random.Random) -> tuple[str, Fields]:
    """A large request, within the limits or beyond them."""
    count = draws.size(rng, 60_000)
    path, fields = rng.choice(
        (
            (CHAT, {"metadata": {f"m{index}": "x" for index in range(count)}}),
            (CHAT, {"messages": _user("word " * (10 * count))}),
            (CHAT, {"messages": _user([{"type": "text", "text": "a"}] * min(count, 5000))}),
            (CHAT, {"chat_template_kwargs": {"a": list(range(count))}}),
            (CHATS, {"messages": [_user()] * min(count, 2100), "max_tokens": 1}),
            (CHAT, {"tools": [_tool({}, index) for index in range(min(count, 1100))]}),
            (COMPLETION, {"prompt": ["a"] * min(count, 2100), "max_tokens": 1}),
            (COMPLETION, {"prompt": [5] * count}),
            (COMPLETION, {"user": "x" * (50 * count)}),
            (RESPONSE, {"input": [{"role": "user", "content": "a"}] * min(count, 5000)}),
            (RESPONSE, {"metadata": {f"m{index}": "x" * 600 for index in range(min(count, 30))}}),
            (EMBEDDING, {"input": ["ab"] * min(count, 2100)}),
            (TOKENIZE, {"prompt": "é" * (10 * count), "return_token_strs": True}),
            (DETOKENIZE, {"tokens": [rng.choice((7, 2**40, -1))] * count}),
            (MESSAGES, {"messages": _user([{"type": "text", "text": "a"}] * min(count, 5000))}),
            (MESSAGES, {"tools": [{"name": f"f{index}", "input_schema": {}} for index in range(min(count, 1100))]}),
            (COUNT_TOKENS, {"system": "word " * (10 * count)}),
            (GENERATE, {"token_ids": [rng.choice((7, 2**40, -1))] * count}),
            (CHAT + RENDER, {"messages": _user("word " * (10 * count))}),
            (COMPLETION + RENDER, {"prompt": ["a"] * min(count, 2100)}),
        )
    )
    return path, usual(path) | fields


_KINDS: dict[str, tuple[Callable[[random.Random], tuple[str, Any]], int]] = {
    "constrained": (_constrained, 40),
    "wrong fields": (_wrong_fields, 20),
    "wrong parts": (_wrong_parts, 15),
    "extremes": (_extremes, 12),
    "raw": (_raw, 10),
    "large": (_large, 3),
}
"""How each kind of case is made, and how many of a hundred are of this kind."""


def named_cases() -> list[Case]:
    """The cases with names."""
    return [Case(name, *make()) for name, make in _named().items()]


def drawn_case(seed: int, number: int, only: str = "") -> Case:
    """Case `number`; `only`: of this kind."""
    rng = draws.draw(seed, "body", number)
    (kind,) = rng.choices(list(_KINDS), [share for _, share in _KINDS.values()])
    path, body = _KINDS[only or kind][0](rng)
    leave_after = 0.5 * rng.random() ** 3 if rng.random() < _EARLY else None
    encoded = body if isinstance(body, bytes) else _json(body)
    return Case(f"case {number} of seed {seed} ({only or kind})", path, encoded, leave_after)
