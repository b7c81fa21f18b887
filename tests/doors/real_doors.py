"""Real servers behind the router and behind the doors of others: a client cannot tell which one it is.

Needs nginx and haproxy (apt-get install nginx haproxy), and vllm-router in an environment of its own: VLLM_ROUTER names
its command. What is missing is skipped: `make doors` says how to get it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.serving import Server, serve

DEPLOY = Path(__file__).parents[2] / "deploy"
CHAT: dict[str, Any] = {
    "model": "demo", "messages": [{"role": "user", "content": "Say something long about rivers."}],
    "max_tokens": 24, "temperature": 0.8, "seed": 5, "logprobs": True, "top_logprobs": 2,
}  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Door:
    """What clients talk to, and what is behind it."""

    url: str
    servers: list[Server]
    has_checks: bool
    """It looks after its servers by itself."""


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serve("demo", "--cpu-threads", "1", *events(port))) for port in _ports(2)]


def _ports(count: int) -> list[int]:
    """For each server the first of two ports for its KV events."""
    return EVENT_PORTS[: 2 * count : 2]


EVENT_PORTS = [free_port() for _ in range(4)]


def events(port: int) -> list[str]:
    try:
        import zmq  # noqa: F401
    except ImportError:
        return []
    index = EVENT_PORTS.index(port)
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://127.0.0.1:{port}",
        "replay_endpoint": f"tcp://127.0.0.1:{EVENT_PORTS[index + 1]}",
    }
    return ["--kv-events-config", json.dumps(config)]


def tool(name: str, install: str) -> str:
    """The path of a program."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"there is no {name}: {install}")
    return path


def shardline_router(folder: Path, urls: list[str], port: int) -> list[str]:
    flags = [word for url in urls for word in ("--backend", url)]
    return [sys.executable, "-m", "shardline", "router", *flags, "--port", str(port)]


def shardline_router_kv_aware(folder: Path, urls: list[str], port: int) -> list[str]:
    pytest.importorskip("zmq", reason="pip install pyzmq")
    lines = [
        f"{url} events=tcp://127.0.0.1:{events} replay=tcp://127.0.0.1:{replay}\n"
        for url, events, replay in zip(urls, EVENT_PORTS[::2], EVENT_PORTS[1::2], strict=True)
    ]
    (folder / "backends").write_text("".join(lines))
    flags = ["--policy", "kv_aware", "--backends-file", str(folder / "backends")]
    return [sys.executable, "-m", "shardline", "router", *flags, "--port", str(port)]


def nginx(folder: Path, urls: list[str], port: int) -> list[str]:
    text = _address((DEPLOY / "nginx/shardline.conf").read_text(), urls, port)
    (folder / "shardline.conf").write_text(text)
    for name in ("body", "proxy", "fastcgi", "uwsgi", "scgi"):
        (folder / name).mkdir()
    paths = "\n".join(f"{name}_temp_path {folder}/{name};" for name in ("proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; client_body_temp_path {folder}/body;\n{paths}\ninclude {folder}/shardline.conf; }}\n"
    )
    return [tool("nginx", "apt-get install nginx"), "-p", str(folder), "-c", str(folder / "nginx.conf")]


def haproxy(folder: Path, urls: list[str], port: int) -> list[str]:
    (folder / "haproxy.cfg").write_text(_address((DEPLOY / "haproxy/haproxy.cfg").read_text(), urls, port))
    return [tool("haproxy", "apt-get install haproxy"), "-db", "-f", str(folder / "haproxy.cfg")]


def vllm_router(folder: Path, urls: list[str], port: int, *flags: str) -> list[str]:
    name = os.environ.get("VLLM_ROUTER", "vllm-router")
    command = tool(name, "pip install vllm-router in an environment of its own, and VLLM_ROUTER=its command")
    where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    often = [
        "--health-check-interval-secs",
        "1",
        "--health-failure-threshold",
        "1",
        "--worker-startup-check-interval",
        "1",
    ]
    return [command, "--worker-urls", *urls, *where, *often, *(flags or ("--policy", "cache_aware"))]


def vllm_router_kv_aware(folder: Path, urls: list[str], port: int) -> list[str]:
    pytest.importorskip("zmq", reason="pip install pyzmq")
    sources = []
    for index, url in enumerate(urls):
        sources += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{EVENT_PORTS[2 * index]}"]
        sources += ["--kv-event-replay-source", f"{url}=tcp://127.0.0.1:{EVENT_PORTS[2 * index + 1]}"]
    return vllm_router(folder, urls, port, "--policy", "kv_aware", *sources, "--kv-event-model", "demo")


def _address(text: str, urls: list[str], port: int) -> str:
    """A configuration of deploy/ with these addresses."""
    for number, url in enumerate(urls, 8001):
        assert f"127.0.0.1:{number}" in text
        text = text.replace(f"127.0.0.1:{number}", url.removeprefix("http://"))
    assert "127.0.0.1:9000" in text
    return text.replace("127.0.0.1:9000", f"127.0.0.1:{port}")


DOORS: list[Callable[[Path, list[str], int], list[str]]] = [
    shardline_router, shardline_router_kv_aware, nginx, haproxy, vllm_router, vllm_router_kv_aware
]  # fmt: skip


@contextlib.contextmanager
def open_door(make: Callable[[Path, list[str], int], list[str]], folder: Path, urls: list[str]) -> Iterator[str]:
    port = free_port()
    command = make(folder, urls, port)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 90.0
        while True:
            assert process.poll() is None, (folder / "log").read_text()[-4000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.post(f"{url}/v1/chat/completions", json={**CHAT, "max_tokens": 1}, timeout=60.0).is_success:
                    break
            assert time.monotonic() < deadline, (folder / "log").read_text()[-4000:]
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module", params=DOORS, ids=lambda make: make.__name__)
def door(request, servers: list[Server], tmp_path_factory) -> Iterator[Door]:
    with open_door(request.param, tmp_path_factory.mktemp("door"), [server.url for server in servers]) as url:
        yield Door(url, servers, request.param is not nginx)


_clients: list[openai.OpenAI] = []


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    """Clients of a test are closed at its end."""
    yield
    while _clients:
        _clients.pop().close()


def client_of(url: str) -> openai.OpenAI:
    _clients.append(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120.0))
    return _clients[-1]


def answer(url: str, **fields: Any) -> tuple[Any, ...]:
    """What must be equal whoever answers."""
    chat = client_of(url).chat.completions.create(**{**CHAT, **fields})
    return (
        chat.choices[0].model_dump(),
        chat.usage.model_dump(exclude={"prompt_tokens_details"}),
        chat.system_fingerprint,
    )


def test_an_answer_is_that_of_a_server(door: Door) -> None:
    direct = answer(door.servers[0].url)
    for _ in range(3):
        assert answer(door.url) == direct
    assert "demo" in {model.id for model in client_of(door.url).models.list()}


def test_a_stream_is_that_of_a_server_and_comes_piece_by_piece(door: Door) -> None:
    def read(url: str) -> tuple[str, int]:
        stream = client_of(url).chat.completions.create(**CHAT, stream=True)
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        return "".join(parts), len(parts)

    direct, through = read(door.servers[0].url), read(door.url)
    assert through[0] == direct[0]
    assert through[1] > 5


def test_a_conversation_goes_on(door: Door) -> None:
    messages = list(CHAT["messages"])
    for turn in range(3):
        direct, through = (answer(url, messages=messages) for url in (door.servers[0].url, door.url))
        assert through == direct
        reply = through[0]["message"]["content"]
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"And {turn}?"}]


def test_a_mistake_of_the_client_is_told(door: Door) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client_of(door.url).chat.completions.create(**{**CHAT, "temperature": -1.0})


def test_completions_and_unicode(door: Door) -> None:
    texts = [
        client_of(url)
        .completions.create(model="demo", prompt="Grüße, 世界", max_tokens=8, temperature=0.0)
        .choices[0]
        .text
        for url in (door.servers[0].url, door.url)
    ]
    assert texts[0] == texts[1]


def test_a_router_knows_what_a_server_has_computed_for_others(servers: list[Server], tmp_path) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "A long story. " * 60}], "max_tokens": 2}
    client_of(servers[1].url).chat.completions.create(**body)
    with open_door(shardline_router_kv_aware, tmp_path, [server.url for server in servers]) as url:
        deadline = time.monotonic() + 30.0
        while True:
            said = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"x-shardline-route": ""}, timeout=60.0)
            route = said.headers["x-shardline-route"]
            if route.startswith(servers[1].url) and "hit 0/" in route.split(servers[0].url)[1]:
                break
            assert time.monotonic() < deadline, route
            body["messages"][0]["content"] += "More. " * 100  # what it has sent itself it would remember
            client_of(servers[1].url).chat.completions.create(**body)
    usage = said.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]


@pytest.mark.parametrize("make", [shardline_router, nginx, haproxy, vllm_router], ids=lambda make: make.__name__)
def test_a_server_that_dies_costs_no_request(make, servers: list[Server], tmp_path) -> None:
    """One that is killed between requests. Its successor on the same port takes part again."""
    with contextlib.ExitStack() as stack:
        victim = stack.enter_context(serve("demo", "--cpu-threads", "1"))
        url = stack.enter_context(open_door(make, tmp_path, [victim.url, servers[0].url]))
        direct = answer(servers[0].url)
        assert answer(url) == direct
        victim.process.kill()
        if make is vllm_router:  # it promises no more than to notice
            _wait_until_noticed(url)
        for _ in range(10):
            assert answer(url) == direct


def _wait_until_noticed(url: str) -> None:
    """Wait until a door has answered as often as it has servers, in a row."""
    deadline, row = time.monotonic() + 30.0, 0
    while row < 4:
        assert time.monotonic() < deadline
        row = row + 1 if httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=60.0).is_success else 0


def test_what_other_doors_ask_for_is_there(servers: list[Server]) -> None:
    url = servers[0].url
    assert httpx.get(f"{url}/load").json() == {"server_load": 0}
    [load] = httpx.get(f"{url}/get_load").json()
    assert {"dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens"} <= load.keys()
    assert "vllm_config" in httpx.get(f"{url}/server_info").json()
    rendered = httpx.post(f"{url}/v1/chat/completions/render", json=CHAT).json()
    assert httpx.post(f"{url}/v1/completions/render", json={"model": "demo", "prompt": "a"}).json()[0]["token_ids"]
    assert len(rendered["token_ids"]) > 5
    said = httpx.get(f"{url}/health", headers={"endpoint-load-metrics-format": "JSON"})
    assert "kv_cache_usage_perc" in said.headers["endpoint-load-metrics"]
    metrics = httpx.get(f"{url}/metrics").text
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
        assert f"vllm:{name}" in metrics
