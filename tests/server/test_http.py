"""All around the endpoints: health, body sizes, malformed requests, and clients that disconnect or are slow."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import socket
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from shardline import __version__
from shardline.config.engine import EngineConfig, SchedulerConfig
from shardline.config.server import ServerConfig
from shardline.server import sse
from shardline.server.app import create_app
from shardline.server.errors import ApiError
from shardline.server.launch import make_http_server, open_listener, url_of
from shardline.server.openai.completions.request import CompletionRequest
from tests.server.conftest import Running, serve, wait_until
from tests.server.fake_engine import REPLY, fake_llm

ENDLESS = {"prompt": "Hi", "max_tokens": 500, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def raw_request(running: Running, body: bytes, headers: str = "") -> socket.socket:
    """A POST /v1/completions on a socket of its own."""
    sock = socket.create_connection(("127.0.0.1", running.port), timeout=5)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}\r\n"
    sock.sendall(head.encode() + body)
    return sock


def raw_json(running: Running, body: object) -> socket.socket:
    data = json.dumps(body).encode()
    return raw_request(running, data, f"Content-Length: {len(data)}\r\n")


def read_answer(sock: socket.socket) -> tuple[int, bytes]:
    """Read the status and the body of the answer on `sock`, and close it."""
    with sock:
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        return answer.status, answer.read()


def test_health_while_ready(http: httpx.Client) -> None:
    for path in ("/health", "/live", "/ready", "/ping"):
        answer = http.get(path)
        assert answer.status_code == 200
        assert answer.json() == {"status": "ready"}
    assert http.get("/version").json() == {"version": __version__}


def test_starting_answers_503_with_retry_after() -> None:
    with serve(ready=False) as running, running.http() as http:
        assert http.get("/live").status_code == 200
        assert http.get("/health").status_code == 503
        assert http.get("/ready").headers["retry-after"]
        answer = http.post("/v1/completions", json={"prompt": "Hi"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "starting"
        assert http.get("/v1/models").status_code == 503
        assert http.get("/metrics").status_code == 200
        running.engine.load.set()
        wait_until(lambda: http.get("/ready").status_code == 200)
        assert http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2}).status_code == 200


def test_draining_refuses_new_and_finishes_old() -> None:
    with serve() as running, running.http() as http:
        running.engine.paused = True
        with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
            running.in_loop(running.llm.drain)
            assert http.get("/health").status_code == 200
            assert http.get("/ready").status_code == 503
            refused = http.post("/v1/completions", json={"prompt": "Hi"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            running.engine.resume()
            assert stream.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_death_of_the_engine_reaches_clients(stream: bool) -> None:
    ends = EngineConfig.from_options(on_failure="exit")
    with serve(engine_config=ends) as running, running.openai() as client, running.http() as http:
        running.engine.paused = True
        if stream:
            hi: ChatCompletionMessageParam = {"role": "user", "content": "Hi"}
            chunks = client.chat.completions.create(model="demo", messages=[hi], stream=True)
            next(chunks)
            running.engine.die("rank 3 on host b was killed")
            with pytest.raises(openai.APIError, match="rank 3 on host b"):
                list(chunks)
        else:
            sock = raw_json(running, ENDLESS)
            wait_until(lambda: running.engine.num_running() == 1)
            running.engine.die("rank 3 on host b was killed")
            status, answer = read_answer(sock)
            assert status == 503
            assert b"rank 3 on host b" in answer
        health = http.get("/health")
        assert health.status_code == 503
        assert "rank 3" in health.json()["reason"]
        assert http.get("/live").status_code == 503
        refused = http.post("/v1/completions", json={"prompt": "Hi"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_dead"


def test_a_stream_outlives_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sse.COMMENT_SECONDS == 5.0, "docs/operations.md promises it"
    monkeypatch.setattr(sse, "COMMENT_SECONDS", 0.05)
    with serve() as running, running.http() as http, running.http() as other:
        running.engine.paused = True
        content, comments = "", 0
        with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
            lines = stream.iter_lines()
            assert "assistant" in next(lines)
            wait_until(lambda: running.engine.num_running() == 1)
            running.engine.reload.clear()
            running.engine.die("rank 3 on host b was killed")
            wait_until(lambda: other.get("/ready").status_code == 503)
            for path in ("/ready", "/health"):
                answer = other.get(path)
                assert (answer.status_code, answer.json()["status"]) == (503, "recovering")
                assert answer.headers["retry-after"]
            assert other.get("/live").status_code == 200
            refused = other.post("/v1/completions", json={"prompt": "Hi"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "recovering")
            assert refused.headers["retry-after"]
            for line in lines:
                comments += line.startswith(":")
                if comments == 2:
                    running.engine.reload.set()
                if line.startswith("data: {"):
                    content += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""
        assert content == REPLY
        assert comments >= 2
        assert other.get("/health").json() == {"status": "ready"}


def test_interrupt_ends_streams_and_answers_with_the_error() -> None:
    with serve() as running, running.http() as http:
        running.engine.paused = True
        waiting = raw_json(running, ENDLESS)
        with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as stream:
            wait_until(lambda: running.engine.num_running() == 2)
            assert len(running.service.in_flight) == 2
            running.in_loop(lambda: running.service.in_flight.interrupt(ApiError(503, "closing time")))
            *_, event, done = stream.read().decode().strip().split("\n\n")
            assert json.loads(event.removeprefix("data: "))["error"]["message"] == "closing time"
            assert done == "data: [DONE]"
        status, answer = read_answer(waiting)
        assert status == 503
        assert b"closing time" in answer
        assert running.engine.num_running() == 0
        wait_until(lambda: len(running.service.in_flight) == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Hi", ["a", "b"]])
def test_client_that_leaves_frees_its_blocks(shared: Running, stream: bool, prompt: object) -> None:
    count = 2 * (2 if isinstance(prompt, list) else 1)
    before = len(shared.engine.aborted)
    shared.engine.seconds_per_token = 0.01
    sock = raw_json(shared, {**ENDLESS, "prompt": prompt, "n": 2, "stream": stream})
    wait_until(lambda: shared.engine.num_running() == count)
    sock.close()
    wait_until(lambda: shared.engine.num_running() == 0)
    shared.engine.seconds_per_token = 0.0
    assert len(shared.engine.aborted) - before == count
    wait_until(lambda: len(shared.service.in_flight) == 0)


def test_client_that_leaves_while_it_sends_is_forgotten(shared: Running) -> None:
    raw_request(shared, b'{"prompt": "Hi', "Content-Length: 1000\r\n").close()
    wait_until(lambda: len(shared.service.in_flight) == 0)


@pytest.mark.slow
def test_client_that_does_not_read_holds_up_nobody(shared: Running, http: httpx.Client) -> None:
    slow = raw_json(shared, {**ENDLESS, "stream": True, "n": 64, "logprobs": 4})
    wait_until(lambda: shared.engine.num_running() > 0)
    assert http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 99}).json()["choices"][0]["text"] == REPLY
    wait_until(lambda: shared.engine.num_running() == 0, 20)
    slow.close()
    wait_until(lambda: len(shared.service.in_flight) == 0)


def test_client_that_reads_slowly_gets_everything(shared: Running) -> None:
    sock = raw_json(shared, {"prompt": "Hi", "max_tokens": 99, "stream": True})
    received = b""
    while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        received += sock.recv(97)
        time.sleep(0.001)
    sock.close()
    chunks = [line for line in received.split(b"\r\n") if line.startswith(b"data: {")]
    events = [
        json.loads(e.removeprefix("data: ")) for c in chunks for e in c.decode().strip().split("\n\n") if "{" in e
    ]
    assert "".join(event["choices"][0]["text"] for event in events) == REPLY


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_refused(chunked: bool) -> None:
    with serve(ServerConfig(max_request_bytes="10Ki")) as running, running.http() as http:
        fits = json.dumps({"prompt": "Hi", "max_tokens": 2, "user": "x" * 10_000}).encode()
        large = json.dumps({"prompt": "x" * 20_000_000}).encode()

        def send(data: bytes) -> httpx.Response:
            pieces = (data[i : i + 65536] for i in range(0, len(data), 65536))
            content = pieces if chunked else data
            return http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})

        assert send(fits).status_code == 200
        answer = send(large)
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert send(fits).status_code == 200


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"{", "could not parse the JSON body"),
        (b"", "no body"),
        (b"[]", "JSON object"),
        (b'"text"', "JSON object"),
        (b"null", ""),
        (b"\xff\xfe{}", ""),
        (b"[" * 200_000, ""),
        (b'{"prompt": "Hi", "seed": ' + b"9" * 6000 + b"}", ""),
        (b'{"prompt": "Hi", "seed": 99999999999999999999999}', "less than or equal to 9223372036854775807"),
        (b'{"prompt": "Hi", "temperature": NaN}', "could not parse"),
        (b'{"prompt": "\\ud800"}', ""),
        (b'{"prompt": "Hi", "stop": "\\ud800"}', ""),
        (b'{"prompt": "Hi", "model": "\\ud800"}', ""),
        (b'{"prompt": "Hi", "\\ud800": 1}', ""),
    ],
)
def test_malformed_bodies(http: httpx.Client, content: bytes, part: str) -> None:
    answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert part in error["message"]
    assert "http" not in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b'{"messages": [' + b"1," * 2_000_000 + b"1]}",
        b'{"messages": [' + b"{}," * 60_000 + b"1]}",
        b'{"prompt": "' + b"[,{" * 500_000 + b'"}',
        b'{"prompt": "Hi", ' + b", ".join(b'"f%d": 1' % index for index in range(20_000)) + b"}",
        b'{"prompt": "' + b'\\"' * 3_000_000,
    ],
    ids=["values", "objects", "a text", "fields", "an open string"],
)
def test_bodies_of_many_parts_are_refused_soon(http: httpx.Client, content: bytes) -> None:
    began = time.monotonic()
    answer = http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text[:200]
    assert answer.json()["error"]["message"]
    assert time.monotonic() - began < 2


def test_other_content_types_are_refused(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", content=b'{"prompt": "Hi"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    answer = http.get("/v1/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "Invalid URL (GET /v1/nothing)"
    answer = http.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert http.put("/ping").headers["allow"] == "GET, POST"
    assert http.put("/v1/responses/resp-1").headers["allow"] == "DELETE, GET"
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_full_queue_is_429() -> None:
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1, max_num_waiting=1))
    with serve(engine_config=config) as running, running.http() as http:
        running.engine.paused = True
        socks = [raw_json(running, ENDLESS) for _ in range(2)]
        wait_until(lambda: running.engine.num_running() == 2)
        answer = http.post("/v1/completions", json={"prompt": "Hi"})
        assert answer.status_code == 429
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        for sock in socks:
            sock.close()
        wait_until(lambda: running.engine.num_running() == 0)


def test_cors_only_for_allowed_origins(http: httpx.Client) -> None:
    ask = {"Origin": "https://chat.example.org", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in http.options("/v1/chat/completions", headers=ask).headers
    config = ServerConfig(allowed_origins=("https://chat.example.org",), api_key=("k",))
    with serve(config) as running, running.http() as own:
        assert own.options("/v1/chat/completions", headers=ask).status_code == 200
        refused = own.get("/v1/models", headers={"Origin": "https://chat.example.org"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://chat.example.org"
        other = own.get("/health", headers={"Origin": "https://evil.example.org"})
        assert "access-control-allow-origin" not in other.headers


def test_request_id_is_kept_or_made(http: httpx.Client) -> None:
    assert "x-request-id" not in http.get("/health").headers
    with serve(ServerConfig(enable_request_id_headers=True)) as running, running.http() as own:
        assert len(own.get("/health").headers["x-request-id"]) == 32
    assert http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    odd = http.get("/health", headers={"X-Request-Id": "a b\tc"}).headers["x-request-id"]
    assert odd.isalnum()
    assert len(odd) == 32


def test_equal_request_ids_do_not_collide(shared: Running, http: httpx.Client) -> None:
    headers = {"X-Request-Id": "same"}
    answers = [http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers) for _ in range(2)]
    assert len({answer.json()["id"] for answer in answers}) == 2


def test_the_access_log_tells_how_a_stream_ended(caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "shardline.access"]

    ends = EngineConfig.from_options(on_failure="exit")
    with caplog.at_level(logging.INFO), serve(engine_config=ends) as running, running.http() as http:
        body = {**CHAT, "stream": True}
        http.post("/v1/chat/completions", json=body)
        running.engine.paused = True
        with http.stream("POST", "/v1/chat/completions", json=body) as stream:
            next(stream.iter_raw())
        wait_until(lambda: len(lines()) == 2)
        with http.stream("POST", "/v1/chat/completions", json=body) as stream:
            events = stream.iter_raw()
            next(events)
            running.engine.die("rank 1 was killed")
            list(events)
        wait_until(lambda: len(lines()) == 3)
        whole, left, failed = lines()
        assert whole.split()[3] == "200"
        assert len(whole.split()) == 6
        assert left.endswith(" disconnected")
        assert failed.endswith(" engine_dead")


def test_log_has_no_prompts(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        http.post("/v1/completions?note=hush", json={"prompt": "secret words", "bad field": 1})
        http.post("/v1/completions", json={"prompt": "secret words", "max_tokens": 2})
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("shardline")]
    assert any("POST /v1/completions 200" in line for line in lines)
    assert any("POST /v1/completions 400" in line for line in lines)
    assert not any("secret" in line or "hush" in line or REPLY in line for line in lines)


def test_openapi_describes_the_endpoints(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize"} <= paths.keys()
    for path, methods in paths.items():
        for operation in methods.values():
            answers = operation["responses"]
            assert "422" not in answers
            content = answers["200"]["content"]
            assert "text/plain" in content or content["application/json"]["schema"]["type"] in ("object", "array"), path
    chat = paths["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert chat["text/event-stream"]["schema"] == {"type": "string"}
    message = chat["application/json"]["schema"]["properties"]["choices"]["items"]["properties"]["message"]
    assert message["properties"]["content"] == {"anyOf": [{"type": "string"}, {"type": "null"}]}


def test_a_crash_is_an_answer_with_a_name_without_details_and_keeps_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def crash(*_: object) -> None:
        raise KeyError("inner secret")

    async def crash_later(*_: object, **__: object) -> None:
        crash()

    with serve() as running, running.http() as http:
        for owner, name, fails in ((CompletionRequest, "check", crash), (running.llm, "submit", crash_later)):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fails)
                answer = http.post("/v1/completions", json={"prompt": "Hi"})
            assert answer.status_code == 500
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "internal_error")
            assert answer.headers["x-request-id"]
            assert "secret" not in answer.text
            assert http.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200
        assert 'method="POST",status="500"' in http.get("/metrics").text


def test_probes_may_ask_for_the_head_alone(http: httpx.Client) -> None:
    for path in ("/health", "/live", "/ready"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_the_prefix_of_a_proxy_may_be_left() -> None:
    with serve(ServerConfig(root_path="/llm")) as running, running.http() as http:
        for path in ("/v1/completions", "/llm/v1/completions", "/llm/v1/completions/"):
            assert http.post(path, json={"prompt": "Hi"}).status_code == 200, path
        assert http.get("/llm/llm/health").status_code == 404


def test_load_counts_requests_that_are_being_answered(http: httpx.Client, shared: Running) -> None:
    assert http.get("/load").json() == {"server_load": 0}
    shared.engine.paused = True
    try:
        thread = threading.Thread(target=lambda: http.post("/v1/completions", json={"prompt": "Hi"}))
        thread.start()
        while not shared.engine.num_running():
            time.sleep(0.01)
        assert http.get("/load").json() == {"server_load": 1}
        assert http.get("/get_load").json()[0].keys() == {"dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens"}
    finally:
        shared.engine.resume()
    thread.join(5)


def test_streams_may_always_have_their_usage() -> None:
    with serve(ServerConfig(enable_force_include_usage=True)) as running, running.http() as http:
        for path, body in (("completions", {"prompt": "Hi"}), ("chat/completions", {"messages": CHAT["messages"]})):
            answer = http.post(f"/v1/{path}", json={**body, "stream": True})
            chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.strip().split("\n\n")[:-1]]
            assert chunks[-1]["usage"]["completion_tokens"] > 0
            assert all(chunk["usage"] for chunk in chunks)


def test_template_variables_may_have_defaults() -> None:
    config = ServerConfig(
        chat_template="{{ a }}{{ b }}{{ messages[0].content }}", default_chat_template_kwargs='{"a": "x", "b": "y"}'
    )
    with serve(config) as running, running.http() as http:
        body = {"messages": CHAT["messages"], "chat_template_kwargs": {"b": "z"}, "return_token_ids": True}
        ids = http.post("/v1/chat/completions", json=body).json()["prompt_token_ids"]
        assert http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "xzHi"


def test_listens_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for _ in range(2):  # the second time, the path is that of a server that was killed
        with contextlib.closing(open_listener(ServerConfig(uds=str(path)))) as listener:
            assert url_of(listener, ServerConfig(uds=str(path))) == f"unix:{path}"
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
    path.unlink()
    path.write_text("precious")
    with pytest.raises(ValueError, match="cannot listen there"):
        open_listener(ServerConfig(uds=str(path)))
    assert path.read_text() == "precious"


def test_does_not_take_the_socket_of_another_server(tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "http.sock"))
    with contextlib.closing(open_listener(config)), pytest.raises(ValueError, match="another server listens there"):
        open_listener(config)
    with pytest.raises(ValueError, match="--uds is empty: give the path"):
        open_listener(ServerConfig(uds=""))
    with pytest.raises(ValueError, match="too long"):
        open_listener(ServerConfig(uds=str(tmp_path / ("x" * 200))))


def test_answers_on_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")

    async def ask() -> int:
        llm, engine = fake_llm()
        engine.load.set()
        await llm.wait_ready()
        config = ServerConfig(uds=path)
        listener = open_listener(config)
        server = make_http_server(create_app(llm, config), config, num_engines=1)
        serving = asyncio.create_task(server.serve([listener]))
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path)) as http:
            answer = await http.get("http://socket/health")
        server.should_exit = True
        await serving
        listener.close()
        await llm.close()
        return answer.status_code

    assert asyncio.run(ask()) == 200
