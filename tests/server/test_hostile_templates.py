"""A chat template that never ends, or fills the memory, costs the chats that make it do so, and nothing else."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from shardline.config.server import ServerConfig
from shardline.text import chat_template
from tests.server.conftest import Running, serve
from tests.server.test_launch import client, process

pytestmark = pytest.mark.slow  # templates run in processes

LOOPS = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
LARGE = "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
TEMPLATE = (
    "{% if messages[0].content == 'loop' %}" + LOOPS + "{% elif messages[0].content == 'fill' %}"
    + LARGE + "{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)  # fmt: skip


def chat(content: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3}


def test_hostile_chats_are_refused_while_a_stream_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.5)
    with serve(ServerConfig(port=0, chat_template=TEMPLATE)) as running, running.http() as http:
        running.engine.seconds_per_token = 0.01
        pauses = follow_stream(running, lambda: refuse(http))
        assert max(pauses) < 1.0
        assert http.post("/tokenize", json=chat("fill")).status_code == 400
        assert http.post("/v1/responses", json={"input": "loop"}).status_code == 400


def refuse(http: httpx.Client) -> None:
    for content, limit in (("loop", "more than 0.5 s"), ("fill", "256 MiB")):
        answer = http.post("/v1/chat/completions", json=chat(content), timeout=30)
        assert answer.status_code == 400
        assert limit in answer.json()["error"]["message"]
        assert http.post("/v1/chat/completions", json=chat("good")).status_code == 200


def follow_stream(running: Running, action: object) -> list[float]:
    """The pauses between the events of a stream that runs beside `action`."""
    body = {"prompt": "Hi", "max_tokens": 500, "ignore_eos": True, "stream": True}
    pauses: list[float] = []
    done = threading.Event()

    def follow() -> None:
        with running.http() as http:
            while not done.is_set():
                with http.stream("POST", "/v1/completions", json=body) as stream:
                    last = time.monotonic()
                    for _ in stream.iter_lines():
                        now = time.monotonic()
                        pauses.append(now - last)
                        last = now
                        if done.is_set():
                            break

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        assert callable(action)
        action()
    finally:
        done.set()
        thread.join(10)
    return pauses


def test_a_signal_ends_the_server_while_a_template_runs() -> None:
    options = {"chat_template": TEMPLATE, "shutdown_timeout": 1.0}
    with process(config=options) as server, client(server.url()) as http:
        threads = [threading.Thread(target=post_quietly, args=(http, chat("loop"))) for _ in range(6)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        server.popen.terminate()
        started = time.monotonic()
        assert server.end(20.0)[0] == 0
        assert time.monotonic() - started < 8.0
        for thread in threads:
            thread.join(10)


def post_quietly(http: httpx.Client, body: dict[str, object]) -> None:
    assert http.post("/v1/chat/completions", json=body, timeout=30).status_code in (400, 503)


def test_a_template_that_cannot_be_compiled_ends_the_start() -> None:
    for source in ("{% for %}", "{{ " + "(" * 50_000 + ")" * 50_000 + " }}"):
        with process(config={"chat_template": source}) as server:
            code, _, err = server.end(20.0)
            assert code == 2
            assert "--chat-template: the chat template (default) is broken" in err
            assert "Traceback" not in err


def test_a_client_that_leaves_takes_its_template_with_it() -> None:
    with serve(ServerConfig(port=0, chat_template=TEMPLATE)) as running:
        for _ in range(18):
            with httpx.Client(base_url=running.url, timeout=0.1, trust_env=False, verify=False) as http:
                try:
                    http.post("/v1/chat/completions", json=chat("loop"))
                except httpx.TimeoutException:
                    continue
        with running.http() as http:
            started = time.monotonic()
            assert http.post("/v1/chat/completions", json=chat("good")).status_code == 200
            assert time.monotonic() - started < 2.0
