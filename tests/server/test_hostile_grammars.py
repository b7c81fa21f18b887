"""What a client writes as a grammar costs its own request at most: it is refused, and others do not wait."""

from __future__ import annotations

import asyncio
import os
import string
import time
from typing import Any

import httpx
import pytest

from shardline.config.server import ServerConfig
from shardline.structured import checks
from tests.server.conftest import Running, serve

pytestmark = pytest.mark.slow  # grammars are tried in processes

HI = [{"role": "user", "content": "Hi"}]
CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(2700)) + 'r2700: "x"\n'
REFERENCES = {
    "$defs": {
        **{
            f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]} for i in range(1000)
        },
        "d1000": {"type": "string"},
    },
    "$ref": "#/$defs/d0",
}  # fmt: skip
LETTERS = {"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in string.ascii_lowercase[:19]]}
DOUBLING = "start: T18\nT0: /[ab]*a[ab]/\n" + "".join(f"T{i}: T{i - 1} T{i - 1}\n" for i in range(1, 19))
OVERLAPPING: dict[str, Any] = {
    "patternProperties": {f".*{a}.*{b}": {} for a in string.ascii_lowercase for b in "abcdefghijkl"}
}
PROPERTIES = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def lark(grammar: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": grammar}}


HOSTILE = {
    "chain": lark(CHAIN),
    "references": form(REFERENCES),
    "letters": form(LETTERS),
    "doubling": lark(DOUBLING),
    "multiple": form({"type": "integer", "multipleOf": 999983}),
    "overlapping": form(OVERLAPPING),
    "cycle": form({"$ref": "#"}),
    "two": form({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "start": lark("start: start"),
    "nothing": lark(r"start: /[^\s\S]/"),
    "empty": form({"enum": []}),
    "nested": {"structured_outputs": {"json": "[" * 50_000 + "]" * 50_000}},
    "regex": {"structured_outputs": {"regex": "(" * 20_000 + ")" * 20_000}},
    "unknown": form({"$ref": "https://example.com/x"}),
}


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_and_others_are_served_meanwhile(
    shared: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that did not serve meanwhile would make every try wait; a busy machine makes some wait."""
    monkeypatch.setattr(checks, "CHECK_SECONDS", 0.4)  # as good here as the real limit, and shorter

    async def longest_wait() -> float:
        longest = 0.0
        async with httpx.AsyncClient(base_url=shared.url, timeout=20, trust_env=False) as client:
            before = resident_bytes()
            asked = asyncio.create_task(client.post("/v1/completions", json={"prompt": "Hi", **HOSTILE[name]}))
            while not asked.done():
                started = time.monotonic()
                assert (await client.get("/live")).status_code == 200
                longest = max(longest, time.monotonic() - started)
                await asyncio.sleep(0.02)
            answer = await asked
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert answer.json()["error"]["param"]
            assert resident_bytes() - before < 30 << 20
        return longest

    assert any(asyncio.run(longest_wait()) < 0.7 for _ in range(8))


@pytest.mark.parametrize(
    ("name", "limits"),
    # Which limit comes first for letters depends on the machine.
    [("chain", ["stack"]), ("letters", ["1 s", "256 MiB"]), ("multiple", ["1 s"])],
)
def test_the_refusal_names_the_limit(http: httpx.Client, name: str, limits: list[str]) -> None:
    message = http.post("/v1/completions", json={"prompt": "Hi", **HOSTILE[name]}).json()["error"]["message"]
    assert any(limit in message for limit in limits)


def test_a_refused_grammar_is_known(http: httpx.Client) -> None:
    body = {"prompt": "Hi", **lark(CHAIN + 'unused: "x"\n')}
    first = http.post("/v1/completions", json=body)
    started = time.process_time()
    for _ in range(20):
        assert http.post("/v1/completions", json=body).content == first.content
    assert time.process_time() - started < 1.0


def test_a_large_schema_works_or_is_refused(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Hi", **form(PROPERTIES)})
    assert answer.status_code in (200, 400)


def test_responses(http: httpx.Client) -> None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": REFERENCES}}
    answer = http.post("/v1/responses", json={"input": "Hi", "text": text})
    assert answer.status_code == 400
    assert "stack" in answer.json()["error"]["message"]


def test_tools() -> None:
    template = "{{ tools | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with serve(ServerConfig(port=0, chat_template=template, tool_call_parser="hermes")) as running:
        tools = [{"type": "function", "function": {"name": "f", "parameters": REFERENCES}}]
        body: dict[str, Any] = {"messages": HI, "tools": tools}
        with running.http() as http:
            refused = http.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
            assert refused.status_code == 400
            assert "stack" in refused.json()["error"]["message"]
            assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_many_hostile_checks_do_not_keep_others_waiting(shared: Running) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=shared.url, timeout=30, trust_env=False) as client:
            hostile = [
                asyncio.create_task(
                    client.post("/v1/completions", json={"prompt": "Hi", **form({**LETTERS, "description": str(i)})})
                )
                for i in range(8)
            ]
            await asyncio.sleep(0.3)
            started = time.monotonic()
            good = await client.post("/v1/completions", json={"prompt": "Hi", "regex": "a fresh one"})
            assert good.status_code == 200
            assert time.monotonic() - started < 3.0
            for one in hostile:  # a client that leaves takes its check with it
                one.cancel()
            await asyncio.gather(*hostile, return_exceptions=True)
            started = time.monotonic()
            other = await client.post("/v1/completions", json={"prompt": "Hi", "regex": "another one"})
            assert other.status_code == 200
            assert time.monotonic() - started < 3.0

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_what_the_engine_refuses_is_the_requests_fault(path: str) -> None:
    body = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": HI} if "chat" in path else {"input": "Hi"}
    with serve() as running, running.http() as http:
        running.engine.refusal = "no token may follow"
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert "no token may follow" in answer.json()["error"]["message"]
        streamed = http.post(path, json={**body, "stream": True})
        assert streamed.status_code in (200, 400)
        assert "no token may follow" in streamed.text
        assert "server_error" not in streamed.text
        assert http.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("value", ["v", 1, {}])
def test_large_metadata_is_refused_at_once(http: httpx.Client, path: str, value: object) -> None:
    body = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": HI} if "chat" in path else {"input": "Hi"}
    count = 49_000 if value else 16_000
    started = time.process_time()
    answer = http.post(path, json={**body, "metadata": {f"k{i}": value for i in range(count)}})
    assert time.process_time() - started < 2.0
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "metadata"
    assert f"{count} entries; at most 16" in answer.json()["error"]["message"]
