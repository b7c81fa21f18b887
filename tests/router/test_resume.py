"""Streams that break off and go on at another backend, at every place: their clients see no difference."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest

from shardline.config.server import ServerConfig
from shardline.deployment.fingerprint import NumericContract
from shardline.router.transcript import Transcript
from shardline.server.resume import Resume
from tests.router.backends import Backend, Call, Site, open_site, say_name
from tests.router.streams import joined, said_by
from tests.server.conftest import Running, serve
from tests.server.fake_engine import REPLY
from tests.server.test_tools import CALLS, TEMPLATE, TOOLS

HI = [{"role": "user", "content": "Hi"}]
LONG_STOP = "Hello, wörld 🙂! X"
"""A stop string that is held back for long, and does not come."""
USAGE = {"stream_options": {"include_usage": True}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": (CHAT, REPLY, {"messages": HI, "temperature": 0.7}),
    "choices": (CHAT, REPLY, {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2, **USAGE}),
    "stop": (CHAT, REPLY, {"messages": HI, "stop": [LONG_STOP, "Bye"], "n": 2, **USAGE}),
    "tools": (CHAT, CALLS, {"messages": HI, "tools": TOOLS, "tool_choice": "auto", **USAGE}),
    "ids": (CHAT, CALLS, {"messages": HI, "tools": TOOLS, "return_token_ids": True, "logprobs": True}),
    "reasoning": (CHAT, f"<think>Hm.\n</think>\n\n{REPLY}", {"messages": HI, **USAGE}),
    "length": (CHAT, REPLY, {"messages": HI, "max_tokens": 7, "logits_digest": True}),
    "receipt": (CHAT, REPLY, {"messages": HI, "n": 2, "seed": 5, "receipt": True}),
    "schema": (CHAT, '{"a": 1}', {"messages": HI, "response_format": {"type": "json_object"}}),
    "echo": (COMPLETIONS, REPLY, {"prompt": "Say", "n": 2, "echo": True, "logprobs": 2, "max_tokens": 20, **USAGE}),
    "prompts": (COMPLETIONS, REPLY, {"prompt": ["Say", "Tell"], "n": 2, "max_tokens": 20, **USAGE}),
    "counts": (
        COMPLETIONS,
        REPLY,
        {"prompt": "Say", "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "nothing": (COMPLETIONS, REPLY, {"prompt": "Say", "max_tokens": 0, "echo": True}),
}
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]
CUSTOM = {"type": "custom", "name": "run"}
OFFERS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters", {"type": "object"})}
    for tool in TOOLS
]
THINKS = f"<think>Hm.\n</think>\n\n{REPLY}"
ITEM_REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "response": (RESPONSES, THINKS, {"input": "Hi", "temperature": 0.7, "enable_response_messages": True}),
    "cut response": (RESPONSES, REPLY, {"input": "Hi", "max_output_tokens": 7}),
    "calls": (RESPONSES, CALLS, {"input": "Hi", "tools": FUNCTIONS}),
    "message": (MESSAGES, THINKS, {"messages": HI, "max_tokens": 100, "temperature": 0.7}),
    "cut message": (MESSAGES, REPLY, {"messages": HI, "max_tokens": 7}),
    "stopped": (MESSAGES, REPLY, {"messages": HI, "max_tokens": 100, "stop_sequences": [LONG_STOP, "wörld"]}),
    "uses": (MESSAGES, CALLS, {"messages": HI, "max_tokens": 100, "tools": OFFERS}),
}
"""Streams of items or blocks, see `joined_items`."""


@dataclass
class Server:
    """A server over a fake engine, and a client of it."""

    running: Running
    http: httpx.Client


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    config = ServerConfig(chat_template=TEMPLATE, reasoning_parser="qwen3", served_model_name=("m",))
    with serve(config) as one, serve(config) as two, one.http() as first, two.http() as second:
        yield [Server(one, first), Server(two, second)]


def answer(server: Server, path: str, reply: str, fields: dict[str, Any]) -> bytes:
    """A whole stream."""
    server.running.engine.reply = reply
    found = server.http.post(path, json={**fields, "stream": True})
    assert found.status_code == 200, found.text
    return found.content


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REQUESTS, *ITEM_REQUESTS])
def test_resume_goes_on_after_every_mark(servers: list[Server], name: str) -> None:
    path, reply, fields = {**REQUESTS, **ITEM_REQUESTS}[name]
    plain = said_by(path, answer(servers[0], path, reply, fields))
    raw = answer(servers[0], path, reply, {**fields, "resume": {}})
    marks = [match.end() for match in re.finditer(rb": resume .*\n\n", raw)]
    places = sorted({*marks[::3], *range(marks[0], len(raw), len(raw) // 6)})
    for place in places:
        transcript = Transcript()
        before = transcript.read(raw[:place])
        if transcript.so_far is None:
            assert not before, "it begins anew"
            continue
        so_far = msgspec.to_builtins(transcript.so_far)
        after = b"" if before.endswith(b"[DONE]\n\n") else answer(servers[1], path, reply, {**fields, "resume": so_far})
        transcript.cut()
        whole = said_by(path, before + transcript.read(after) + transcript.end())
        assert whole == plain, f"cut at byte {place} of {len(raw)}"


class Cutter:
    """A way to a server. It cuts the next stream of any of them for each number in `places`, after so many bytes."""

    def __init__(self, server: Server, places: list[int]) -> None:
        self._port = server.running.port
        self._places = places
        self._connections: set[asyncio.Task[Any] | None] = set()
        """Where a client has ended its half, nothing else refers to them: they would be collected as they wait."""

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._connect, "127.0.0.1", 0)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(asyncio.current_task())
        try:
            await self._cut(reader, writer)
        finally:
            self._connections.discard(asyncio.current_task())

    async def _cut(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer.transport), contextlib.suppress(ConnectionError):
            upstream, sink = await asyncio.open_connection("127.0.0.1", self._port)
            with contextlib.closing(sink):
                sending = asyncio.create_task(self._pass_on(reader, sink))
                try:
                    await self._answer(upstream, writer)
                finally:
                    sending.cancel()

    @staticmethod
    async def _pass_on(reader: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.closing(sink):
            while data := await reader.read(65536):
                sink.write(data)

    async def _answer(self, upstream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left: int | None = None
        while data := await upstream.read(65536):
            if left is None and self._places and b"text/event-stream" in data:
                left = self._places.pop() + data.index(b"\r\n\r\n") + 4
            writer.write(data if left is None else data[:left])
            if left is not None and (left := left - len(data)) <= 0:
                await writer.drain()
                return


@pytest.fixture(scope="module")
def routed(servers: list[Server]) -> Iterator[tuple[Site, list[int]]]:
    """A router before the servers, and the places at which the next streams are cut."""
    with open_site() as site:
        places: list[int] = []
        for server in servers:
            cutter = site.run(Cutter(server, places).serve())
            url = f"http://127.0.0.1:{cutter.sockets[0].getsockname()[1]}"
            site.backends.append(Backend("cutter", say_name, url=url, server=cutter))
        site.start_router(policy="round_robin")
        yield site, places


def through_router(site: Site, path: str, fields: dict[str, Any]) -> bytes:
    with site.client.stream("POST", path, json={**fields, "model": "m", "stream": True}) as stream:
        assert stream.status_code == 200
        return b"".join(stream.iter_raw())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chat", "stop", "tools", "echo", "calls", "stopped"])
def test_resume_through_the_router(routed: tuple[Site, list[int]], servers: list[Server], name: str) -> None:
    site, places = routed
    path, reply, fields = {**REQUESTS, **ITEM_REQUESTS}[name]
    plain = answer(servers[0], path, reply, fields)
    servers[1].running.engine.reply = reply
    resumes = number(site, "resumes_total")
    for place in range(1, len(plain), len(plain) // 8):
        places.append(place)
        said = said_by(path, through_router(site, path, fields))
        assert not places
        assert said == said_by(path, plain), f"cut after {place} bytes"
        for backend in site.fleet.backends:
            backend.breaker.succeed()
    assert number(site, "resumes_total") > resumes


def number(site: Site, name: str) -> float:
    """The value of a counter of the router."""
    found = re.search(rf"^shardline_router:{name} (\S+)$", site.client.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_a_client_sees_no_marks(routed: tuple[Site, list[int]], servers: list[Server]) -> None:
    site, _ = routed
    for server in servers:
        server.running.engine.reply = REPLY
    assert b"resume" not in through_router(site, CHAT, {"messages": HI})
    own = through_router(site, CHAT, {"messages": HI, "resume": {}})
    assert own.count(b": resume ") > 3, "a client that asks for marks gets them"
    assert b"resume" not in through_router(site, CHAT, {"messages": HI, "resume": None})


def test_resume_needs_an_equal_contract(routed: tuple[Site, list[int]], servers: list[Server]) -> None:
    site, places = routed
    llms = [server.running.llm for server in servers]
    was = llms[1].model
    llms[1]._ready = dataclasses.replace(was, contract=NumericContract("other"))
    try:
        for states_it in (False, True):
            other = site.fleet.backends[1]
            other.contract = llms[states_it].model.contract.sha256
            places.append(700)
            said = joined(through_router(site, CHAT, {"messages": HI}))
            assert said["ends"] == ["backend_failed", "[DONE]"]
            for backend in site.fleet.backends:
                backend.breaker.succeed()
    finally:
        llms[1]._ready = was
        site.fleet.backends[1].contract = was.contract.sha256


def first_mark(server: Server) -> dict[str, Any]:
    """What a chat's first mark says."""
    raw = answer(server, CHAT, REPLY, {"messages": HI, "resume": {}})
    mark = json.loads(raw.split(b"\n\n")[0].removeprefix(b": resume "))
    assert isinstance(mark, dict)
    return mark


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, 200),
        ({"contract": "0" * 64}, 409),
        ({"contract": ""}, 400),
        ({"id": ""}, 400),
        ({"id": "x" * 65}, 400),
        ({"created": -1}, 400),
        ({"num_events": -1}, 400),
        ({"prompts": [{}]}, 400),
        ({"prompts": "x"}, 400),
        ({"other": 1}, 400),
        ({"seed": 2**64}, 400),
        ({"request": "0" * 64}, 409),
        ({"seed": 1}, 409),
        ({"choices": []}, 400),
        ({"choices": [{}, {}]}, 400),
        ({"choices": [{"token_ids": [-1]}]}, 400),
        ({"choices": [{"token_ids": [2**70]}]}, 400),
        ({"choices": [{"token_ids": ["a"]}]}, 400),
        ({"choices": [{"token_ids": [5] * 600}]}, 400),
        ({"choices": [{"token_ids": [5] * 511, "finished": 1}]}, 400),
        ({"num_cached_tokens": -1}, 400),
    ],
)
def test_a_wrong_resume_is_refused(servers: list[Server], change: dict[str, Any], status: int) -> None:
    resume = first_mark(servers[0])
    for name, value in change.items():
        if name in Resume.__struct_fields__ or name == "other":
            resume[name] = value
        else:
            resume["prompts"][0][name] = value
    found = servers[0].http.post(CHAT, json={"messages": HI, "stream": True, "resume": resume})
    assert found.status_code == status, found.text
    if status != 200:
        assert found.json()["error"]["param"] in ("resume", "max_tokens")
        assert "resume" in found.json()["error"]["message"] or status == 409


def test_a_resume_of_another_request_is_refused(servers: list[Server]) -> None:
    resume = first_mark(servers[0])
    http = servers[1].http
    servers[1].running.engine.reply = REPLY
    for fields in ({"max_tokens": 3}, {"temperature": 0.5}, {"stop": ["x"]}, {"cache_salt": "s"}):
        found = http.post(CHAT, json={"messages": HI, "stream": True, "resume": resume, **fields})
        assert (found.status_code, found.json()["error"]["code"]) == (409, "request_differs")
    two = http.post(COMPLETIONS, json={"prompt": ["a", "b"], "stream": True, "resume": resume})
    assert (two.status_code, two.json()["error"]["param"]) == (400, "resume")
    whole = http.post(CHAT, json={"messages": HI, "resume": {}})
    assert (whole.status_code, whole.json()["error"]["param"]) == (400, "resume")
    stopped, whole_answer = (
        http.post(CHAT, json={"messages": HI, "stream": True, "resume": {}, **fields}).content
        for fields in ({"stop": ["Hello"]}, {})
    )
    transcript = Transcript()
    transcript.read(whole_answer)
    assert transcript.so_far is not None
    so_far = json.loads(stopped.split(b"\n\n")[0].removeprefix(b": resume "))
    so_far["prompts"][0]["choices"] = msgspec.to_builtins(transcript.so_far.prompts[0].choices)
    found = http.post(CHAT, json={"messages": HI, "stream": True, "stop": ["Hello"], "resume": so_far})
    assert (found.status_code, "stop string" in found.text) == (400, True)


def test_what_a_response_cannot_go_on_with_is_refused(servers: list[Server]) -> None:
    fields: dict[str, Any] = {"input": "Hi", "stream": True}
    raw = answer(servers[0], RESPONSES, REPLY, {**fields, "resume": {}})
    first = json.loads(raw.split(b"\n\n")[0].removeprefix(b": resume "))
    for more in ({"background": True}, {"include": ["message.output_text.logprobs"]}, {"resume": {"id": "resp_1"}}):
        found = servers[1].http.post(RESPONSES, json={**fields, "resume": first, **more})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "resume"), more
        if "resume" not in more:
            assert b": resume" not in answer(servers[0], RESPONSES, REPLY, {**fields, "resume": {}, **more})
    servers[1].running.engine.reply = "Bye."
    again = servers[0].http.post(RESPONSES, json={**fields, "resume": first})
    assert again.status_code == 200
    kept = servers[0].http.get(f"{RESPONSES}/{first['id']}").json()
    assert kept["output"][0]["content"][0]["text"] == REPLY, "nobody writes over what is kept"
    whole = servers[0].http.post(MESSAGES, json={"messages": HI, "max_tokens": 5, "resume": {}})
    assert (whole.status_code, whole.json()["error"]["type"]) == (400, "invalid_request_error")


def test_server_info_states_the_contract(servers: list[Server]) -> None:
    info = servers[0].http.get("/server_info").json()["numeric_contract"]
    [card] = servers[0].http.get("/v1/models").json()["data"]
    assert info["system_fingerprint"] == "sl-fake"
    assert set(info) == {*NumericContract.__struct_fields__, "sha256", "system_fingerprint"}
    assert card["numeric_contract"] == info["sha256"] == NumericContract("fake").sha256


SO_FAR = {
    "contract": "c",
    "id": "chatcmpl-1",
    "created": 1,
    "prompts": [{"seed": 1, "request": "r", "choices": [{"token_ids": [], "finished": False}]}],
}


def event(text: str) -> str:
    """An event of a mock, without the frame of its field."""
    return json.dumps(
        {"id": "chatcmpl-1", "created": 1, "choices": [{"index": 0, "text": text, "finish_reason": None}]}
    )


async def send_block(call: Call, block: str) -> None:
    data = f"{block}\n\n".encode()
    await call.send(b"%x\r\n%s\r\n" % (len(data), data))


@pytest.fixture
def mocks() -> Iterator[Site]:
    with open_site() as site:
        yield site


def start_mocks(site: Site, *behaviours: Any) -> None:
    """Backends with equal contracts; the first one gets the first request."""
    for behave in behaviours:
        site.add_backend(behave, contract="c")
    site.start_router(policy="round_robin")


def mock_stream(*blocks: str) -> Any:
    async def behave(call: Call) -> None:
        await call.begin_stream()
        for block in blocks:
            if block == "cut":
                call.cut()
                return
            await send_block(call, block)
        await call.end_stream()

    return behave


FIRST = f": resume {json.dumps(SO_FAR)}"
ONE = f"data: {event('one')}"
TWO = f"data: {event('two')}"
DEAD = 'data: {"error":{"message":"it died","type":"server_error","param":null,"code":"engine_dead"}}'
FAILED = 'data: {"error":{"message":"it gave up","type":"server_error","param":null,"code":"answer_failed"}}'


@pytest.mark.parametrize(
    "blocks",
    [
        [FIRST, ONE, ": resume [0,0,[[0,[7],false]]]", "cut"],
        [FIRST, ONE, ": resume [0,0,[[0,[7],false]]]", TWO, "cut"],
        [FIRST, ONE, ": resume [0,0,[[0,[7],false]]]", DEAD],
        [FIRST, ": still working", ONE, ": resume [0,0,[[0,[7],false]]]", ": resume [5]", "cut"],
    ],
)
def test_resume_after_the_last_mark(mocks: Site, blocks: list[str]) -> None:
    go_on = mock_stream(TWO, ": resume [0,0,[[0,[8],true]]]")
    start_mocks(mocks, mock_stream(*blocks), go_on)
    said = joined(through_router(mocks, COMPLETIONS, {"prompt": "hi"}))
    assert (said["choices"][0]["text"], said["ends"]) == ("onetwo", ["[DONE]"])
    first, second = (backend.calls[0].fields for backend in mocks.backends)
    assert first == {"prompt": "hi", "model": "m", "stream": True, "resume": {}}
    [prompt] = second.pop("resume")["prompts"]
    assert (prompt["seed"], prompt["choices"]) == (1, [{"token_ids": [7], "finished": False}])
    assert second == {"prompt": "hi", "model": "m", "stream": True}


@pytest.mark.parametrize(
    ("blocks", "text", "ends"),
    [
        ([ONE, "cut"], "one", ["backend_failed", "[DONE]"]),  # it takes no part
        ([FIRST, ONE, FAILED], "one", ["answer_failed", "[DONE]"]),  # the request is at fault, not the backend
        ([FIRST, f"data: {event('x' * 300_000)}", "cut"], "x" * 300_000, ["backend_failed", "[DONE]"]),
    ],
)
def test_no_resume_is_ever_a_guess(mocks: Site, blocks: list[str], text: str, ends: list[str]) -> None:
    start_mocks(mocks, mock_stream(*blocks), mock_stream(TWO))
    said = joined(through_router(mocks, COMPLETIONS, {"prompt": "hi"}))
    assert (said["choices"][0]["text"], said["ends"]) == (text, ends)
    assert not mocks.backends[1].calls


def framed(kind: str, **fields: Any) -> str:
    """An event of a stream of items or blocks."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}"


BUSY = framed("error", error={"type": "overloaded_error", "message": "it died"})
BROKEN = framed("error", error={"type": "api_error", "message": "it gave up"})
DEAD_RESPONSE = framed("response.failed", response={"error": {"code": "engine_dead", "message": "it died"}})
BROKEN_RESPONSE = framed("response.failed", response={"error": {"code": "answer_failed", "message": "it gave up"}})


def item_stream(*blocks: str) -> Any:
    async def behave(call: Call) -> None:
        await call.begin_stream()
        for block in blocks:
            await send_block(call, block)
        await call.send(b"0\r\n\r\n")

    return behave


@pytest.mark.parametrize(
    ("path", "end", "goes_on"),
    [
        (MESSAGES, BUSY, True),
        (MESSAGES, BROKEN, False),
        (RESPONSES, DEAD_RESPONSE, True),
        (RESPONSES, BROKEN_RESPONSE, False),
    ],
)
def test_streams_of_items_go_on_when_their_engine_dies(mocks: Site, path: str, end: str, goes_on: bool) -> None:
    first = [FIRST, framed("a"), framed("b"), ": resume []", framed("c"), ": resume [0,0,[[0,[7],false]]]", framed("d")]
    start_mocks(mocks, item_stream(*first, end), item_stream(framed("d"), framed("e")))
    said = through_router(mocks, path, {}).split(b"\n\n")
    kinds = [block.split(b"\n")[0] for block in said[:-1]]
    last = [b"event: d", b"event: e"] if goes_on else [b"event: d", end.encode().split(b"\n")[0]]
    assert kinds == [b"event: a", b"event: b", b"event: c", *last]
    assert len(mocks.backends[1].calls) == goes_on
    if goes_on:
        assert mocks.backends[1].calls[0].fields["resume"]["num_events"] == 3


def test_a_stream_that_cannot_go_on_ends_as_its_endpoint_does(mocks: Site) -> None:
    async def behave(call: Call) -> None:
        await call.begin_stream()
        await send_block(call, framed("a"))
        call.cut()

    mocks.add_backend(behave)
    mocks.start_router()
    *_, message, nothing = through_router(mocks, MESSAGES, {}).split(b"\n\n")
    assert (message.split(b"\n")[0], nothing) == (b"event: error", b"")
    error = json.loads(message.partition(b"data: ")[2])
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert mocks.backends[0].url in error["error"]["message"]
    *_, response, nothing = through_router(mocks, RESPONSES, {}).split(b"\n\n")
    error = json.loads(response.partition(b"data: ")[2])
    assert (error["type"], error["code"], nothing) == ("error", "backend_failed", b"")
    unknown = mocks.client.post(MESSAGES, json={"model": "unknown", "messages": HI})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


def test_resumes_are_bounded(mocks: Site) -> None:
    part = [ONE, ": resume [0,0,[[0,[7],false]]]", "cut"]
    start_mocks(mocks, mock_stream(FIRST, *part), *[mock_stream(*part)] * 5)
    said = joined(through_router(mocks, COMPLETIONS, {"prompt": "hi"}))
    assert said["ends"] == ["backend_failed", "[DONE]"]
    assert sum(len(backend.calls) for backend in mocks.backends) == 3
