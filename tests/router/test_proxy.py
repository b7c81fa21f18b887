"""The router between real clients and backends that fail in every way."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import httpx
import pytest

from shardline.config.router import RouterConfig
from shardline.config.server import ServerConfig
from shardline.router.app import create_app
from shardline.router.fleet import Fleet
from shardline.router.prompts import Prompt
from shardline.server.keys import ApiKeys
from shardline.server.middleware import InFlight
from tests.router.backends import Backend, Behaviour, Call, Site, open_site, say_name, silent, stream_words


@pytest.fixture
def site() -> Iterator[Site]:
    with open_site() as made:
        yield made


async def fail(call: Call) -> None:
    await call.answer(500, {"error": {"message": "broken", "type": "server_error", "param": None, "code": None}})


async def cut(call: Call) -> None:
    call.cut()


async def babble(call: Call) -> None:
    await call.send(b"this is not HTTP\r\n\r\n")


async def no_status(call: Call) -> None:
    await call.answer(600, {})


async def endless_headers(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\nx: ")
    while True:
        await call.send(b"x" * 65536)


async def drip(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500000\r\n\r\n{")
    while True:
        await call.send(b" ")
        await asyncio.sleep(0.01)


async def half_an_answer(call: Call) -> None:
    await call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{")
    call.cut()


async def no_token(call: Call) -> None:
    await call.begin_stream()
    call.cut()


async def full(call: Call) -> None:
    await call.answer(429, {"error": {"message": "full"}}, retry_after="7")


async def refuse(call: Call) -> None:
    await call.answer(400, {"error": {"message": "bad", "type": "x", "param": None, "code": None}})


def test_a_request_and_its_answer_go_through(site: Site) -> None:
    backend = site.add_backend()
    site.start_router()
    answer = site.client.post(
        "/v1/completions?a=b",
        json={"model": "m", "prompt": "é"},
        headers={"Authorization": "Bearer key", "X-Request-Id": "r1", "X-Other": "o", "Connection": "keep-alive"},
    )
    assert (answer.status_code, answer.json()["prompt"]) == (200, "é")
    assert answer.headers["x-request-id"] == "r1"
    [call] = backend.calls
    assert (call.method, call.path, call.fields) == ("POST", "/v1/completions?a=b", {"model": "m", "prompt": "é"})
    assert call.headers["authorization"] == "Bearer key"
    assert call.headers["x-request-id"] == "r1"
    assert call.headers["x-other"] == "o"


@pytest.mark.parametrize("behave", [say_name, stream_words])
def test_connections_to_backends_are_used_again(site: Site, behave: Behaviour) -> None:
    backend = site.add_backend(behave)
    site.start_router(health_interval=5.0)
    before = backend.num_connections
    for _ in range(6):
        assert site.ask().status_code == 200
    assert backend.num_connections - before <= 1


def test_a_stream_goes_through_as_it_comes(site: Site) -> None:
    go_on = asyncio.Event()

    async def wait_between(call: Call) -> None:
        await call.begin_stream()
        await call.send_event("one")
        await go_on.wait()
        await call.send_event("two")
        await call.end_stream()

    site.add_backend(wait_between)
    site.start_router()
    with site.client.stream("POST", "/v1/completions", json={"model": "m", "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: one"
        site.run(_set(go_on))
        assert [line for line in lines if line] == ["data: two", "data: [DONE]"]


async def _set(event: asyncio.Event) -> None:
    event.set()


@pytest.mark.parametrize("behave", [fail, cut, babble, endless_headers, half_an_answer, no_token, full])
def test_what_fails_before_the_first_token_is_given_to_another(site: Site, behave) -> None:
    bad, good = site.add_backend(behave), site.add_backend()
    site.start_router(policy="round_robin")
    for number in range(4):
        assert site.ask(str(number)).json()["prompt"] == str(number)
    assert bad.calls
    assert len(good.calls) == 4


def test_a_status_that_http_does_not_have_is_a_failure(site: Site) -> None:
    site.add_backend(no_status)
    site.start_router()
    assert site.ask().status_code == 502


@pytest.mark.parametrize("behave", [silent, drip])
def test_a_silent_backend_is_left_after_its_time(site: Site, behave: Behaviour) -> None:
    site.add_backend(behave)
    site.add_backend()
    site.start_router(policy="round_robin", answer_timeout=0.3)
    assert site.ask().status_code == 200
    assert site.ask().status_code == 200


def test_a_backend_that_always_fails_is_left_alone_for_a_while(site: Site, monkeypatch) -> None:
    monkeypatch.setattr("shardline.router.breaker._FIRST_SECONDS", 60.0)
    bad = site.add_backend(fail)
    site.add_backend()
    site.start_router(policy="round_robin")
    for _ in range(20):
        assert site.ask().status_code == 200
    assert len(bad.calls) == 3
    assert "shardline_router:breaker_open" in site.client.get("/metrics").text
    bad.behave = say_name
    site.fleet.backends[0].breaker._open_until = time.monotonic()
    for _ in range(4):
        site.ask()
    assert len(bad.calls) > 3


def test_refusals_of_the_request_are_the_clients(site: Site) -> None:
    backends = [site.add_backend(refuse), site.add_backend(refuse)]
    site.start_router()
    for _ in range(10):
        answer = site.ask()
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "bad")
    assert sum(len(backend.calls) for backend in backends) == 10, "none was tried twice"
    assert all(backend.breaker.state(0.0) == "closed" for backend in site.fleet.backends)


def test_full_backends_are_named_and_left_alone(site: Site) -> None:
    site.add_backend(full)
    site.add_backend(full)
    site.start_router(max_queue=0)
    answer = site.ask()
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "7"
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    site.backends[1].behave = say_name
    site.fleet.backends[1].busy_until = 0.0
    site.backends[0].calls.clear()
    assert site.ask().status_code == 200
    assert not site.backends[0].calls, "it has asked to be left alone"


def test_when_all_fail_the_client_hears_which_and_why(site: Site) -> None:
    site.add_backend(cut)
    site.add_backend(cut)
    site.start_router()
    answer = site.ask()
    assert answer.status_code == 502
    message = answer.json()["error"]["message"]
    assert all(f"{backend.url}: it has closed the connection" in message for backend in site.backends)
    site.backends[0].behave = site.backends[1].behave = fail
    assert site.ask().json()["error"]["message"] == "broken"


def test_retries_are_bounded(site: Site) -> None:
    backends = [site.add_backend(cut) for _ in range(4)]
    site.start_router(retries=1)
    site.ask()
    assert sum(len(backend.calls) for backend in backends) == 2


def test_retries_are_at_most_a_fifth_of_the_requests(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardline.router.breaker._FAILURES", 1000)  # or the breakers would spare the backends
    backends = [site.add_backend(fail) for _ in range(3)]
    site.start_router()
    assert {site.ask().status_code for _ in range(60)} == {500}
    retries = sum(len(backend.calls) for backend in backends) - 60
    assert 20 <= retries <= 10 + 60 // 5, "ten are in reserve"


def test_a_stream_that_is_cut_ends_with_an_error(site: Site) -> None:
    async def cut_later(call: Call) -> None:
        await call.begin_stream()
        await call.send_event("one")
        await asyncio.sleep(0.05)
        call.cut()

    site.add_backend(cut_later)
    other = site.add_backend()
    site.start_router(policy="round_robin")
    events = [line for line in site.ask(stream=True).text.split("\n\n") if line]
    assert events[0] == "data: one"
    error = json.loads(events[1].removeprefix("data: "))["error"]
    assert error["code"] == "backend_failed"
    assert site.backends[0].url in error["message"]
    assert events[2] == "data: [DONE]"
    assert not other.calls, "a client that has tokens gets no others"
    for backend in site.backends:
        backend.behave = cut_later
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    events = [line for line in site.client.post("/cohere/v2/chat", json=body).text.split("\n\n") if line]
    ended = json.loads(events[1].removeprefix("data: "))
    assert (ended["type"], ended["delta"]["finish_reason"]) == ("message-end", "ERROR")
    assert "failed in the middle" in ended["delta"]["error"]
    assert events[2] == "data: [DONE]"


def test_half_an_event_is_never_a_client_s(site: Site) -> None:
    for end in (b"\n\n", b"\r\n\r\n"):

        async def half_an_event(call: Call, end: bytes = end) -> None:
            await call.begin_stream()
            for data in (b"data: one" + end + b"data: t", b'wo {"half'):
                await call.send(b"%x\r\n%s\r\n" % (len(data), data))
                await asyncio.sleep(0.02)
            await call.send(b"500\r\ndata: half a chunk")
            call.cut()

        site.add_backend(half_an_event)
    site.start_router(policy="round_robin")
    for _ in range(2):
        answer = site.ask(stream=True)
        events = [line for line in answer.text.splitlines() if line]
        assert (events[0], json.loads(events[1][6:])["error"]["code"]) == ("data: one", "backend_failed")
        assert events[2:] == ["data: [DONE]"]


def test_a_stream_that_falls_silent_ends_with_an_error(site: Site) -> None:
    async def fall_silent(call: Call) -> None:
        await call.begin_stream()
        await call.send_event("one")
        await silent(call)

    backend = site.add_backend(fall_silent)
    site.start_router(answer_timeout=0.3)
    events = [line for line in site.ask(stream=True).text.splitlines() if line]
    assert (events[0], events[2]) == ("data: one", "data: [DONE]")
    assert "nothing came for 0.3 s" in json.loads(events[1][6:])["error"]["message"]
    site.wait_for(lambda: backend.left == 1)


def test_without_a_key_only_this_machine_administers(site: Site) -> None:
    site.start_router()
    server = ServerConfig(disable_access_log=True)
    app = create_app(site.fleet, RouterConfig(), server, ApiKeys(server), InFlight())

    async def statuses(host: str) -> list[int]:
        transport = httpx.ASGITransport(app, client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            drain = await client.post("/router/drain", json={"url": "http://a"})
            return [(await client.get("/router/status")).status_code, drain.status_code]

    assert site.run(statuses("192.0.2.1")) == [401, 401]
    assert site.run(statuses("127.0.0.1")) == [200, 400]


def test_models_are_merged_and_requests_go_where_their_model_is(site: Site) -> None:
    first, second = site.add_backend(models=["a", "both"]), site.add_backend(models=["b", "both"])
    site.start_router()
    assert [entry["id"] for entry in site.client.get("/v1/models").json()["data"]] == ["a", "both", "b"]
    for _ in range(3):
        assert site.ask(model="b").status_code == 200
    assert (len(first.calls), len(second.calls)) == (0, 3)
    answer = site.ask(model="c")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    message = answer.json()["error"]["message"]
    assert "a, both, b" in message
    body = {"model": "c", "messages": [{"role": "user", "content": "hi"}]}
    answers = [site.client.post(path, json=body).json() for path in ("/v1/messages", "/cohere/v2/chat")]
    assert answers == [
        {"type": "error", "error": {"type": "not_found_error", "message": message}},
        {"message": message},
    ]


def test_backends_come_go_and_drain(site: Site) -> None:
    first, second = site.add_backend(), site.add_backend(ready=503)
    site.start_router(policy="round_robin")
    site.fleet.backends[0].is_draining = True
    message = site.ask().json()["error"]["message"]
    assert f"({first.url}: draining; {second.url}: GET /ready says 503)" in message
    site.fleet.backends[0].is_draining = False
    assert [site.ask().status_code for _ in range(3)] == [200] * 3
    assert not second.calls
    second.ready = 200
    site.wait_for(lambda: site.fleet.backends[1].is_ready)
    answer = site.client.post("/router/drain", json={"url": first.url})
    assert [backend["state"] for backend in answer.json()["backends"]] == ["draining", "ready"]
    first.calls.clear()
    assert [site.ask().status_code for _ in range(3)] == [200] * 3
    assert (len(first.calls), len(second.calls)) == (0, 3)
    site.client.post("/router/remove", json={"url": first.url})
    third = Backend("b2", stream_words)
    site.backends.append(third)
    site.run(third.serve())
    assert site.client.post("/router/add", json={"url": third.url}).status_code == 200
    site.wait_for(lambda: site.fleet.backends[1].is_ready)
    site.ask()
    site.ask()
    assert len(third.calls) == 1
    for url, message in ((third.url, "is there already"), ("ftp://x", "is no URL of a server")):
        answer = site.client.post("/router/add", json={"url": url})
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
    assert site.client.post("/router/drain", json={"url": "http://nowhere"}).status_code == 400
    assert site.client.post("/router/explode", json={"url": third.url}).status_code == 404
    assert site.client.post("/router/drain", content=b"[").status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("POST", "/v1/models", 405, "method_not_allowed"), ("GET", "/router/no/such", 404, "unknown_url")],
)
def test_mistakes_at_the_router_s_own_paths_are_told(
    site: Site, method: str, path: str, status: int, code: str
) -> None:
    site.start_router()
    answer = site.client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert path in answer.json()["error"]["message"]
    assert ("allow" in answer.headers) == (status == 405)


def test_without_a_backend_the_answer_is_503_at_once(site: Site) -> None:
    site.start_router()
    answer = site.ask()
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "no_backend"
    assert site.client.get("/ready").status_code == 503
    assert site.client.get("/live").status_code == 200


def test_a_backend_that_dies_is_left_before_a_request_meets_it(site: Site) -> None:
    first, _ = site.add_backend(), site.add_backend()
    site.start_router()
    assert first.server is not None
    site.run(_close(first))
    site.wait_for(lambda: not site.fleet.backends[0].is_ready)
    assert site.ask().status_code == 200
    assert "no connection" in site.client.get("/router/status").json()["backends"][0]["problem"]


async def _close(backend: Backend) -> None:
    assert backend.server is not None
    backend.server.close()


def test_keys_guard_the_router_and_open_its_backends(site: Site) -> None:
    backend = site.add_backend()
    server = ServerConfig(api_key=("mine",), admin_api_key="root", disable_access_log=True)
    site.start_router(server, backend_api_key="theirs")
    assert site.ask().status_code == 401
    site.client.headers["Authorization"] = "Bearer mine"
    assert site.ask().status_code == 200
    assert backend.calls[0].headers["authorization"] == "Bearer theirs"
    assert site.client.get("/router/status").status_code == 401
    site.client.headers["Authorization"] = "Bearer root"
    assert site.client.get("/router/status").json()["backends"][0]["state"] == "ready"


def test_a_conversation_stays_where_its_cache_is(site: Site) -> None:
    backends = [site.add_backend(), site.add_backend(), site.add_backend()]
    site.start_router()
    for number in range(6):
        talk = f"conversation {number} " * 40
        for turn in range(4):
            site.ask(talk + "and " * turn)
    homes: dict[str, set[str]] = {}
    for backend in backends:
        for call in backend.calls:
            homes.setdefault(call.fields["prompt"][:15], set()).add(backend.name)
    assert all(len(home) == 1 for home in homes.values()), homes


def test_a_prompt_is_pending_until_its_first_token(site: Site) -> None:
    """The first event of a chat has a role, and comes before the prompt is computed."""
    go_on = asyncio.Event()

    async def answer_late(call: Call) -> None:
        await call.begin_stream()
        await call.send_event("role")
        await go_on.wait()
        await call.send_event("token")
        await call.end_stream()

    site.add_backend(answer_late)
    site.start_router()
    body = {"model": "m", "stream": True, "prompt": "x" * 2000}
    with site.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: role"
        assert site.fleet.backends[0].pending_chunks == 7
        site.run(_set(go_on))
        while next(lines) != "data: token":
            pass
        assert site.fleet.backends[0].pending_chunks == 0
        assert list(lines)[-2:] == ["data: [DONE]", ""]


def test_backends_are_measured() -> None:
    fleet = Fleet(RouterConfig(("http://a", "http://b")))
    for number in range(40):
        slowness = 1 + 3 * (number % 2)
        choice = fleet.choose(Prompt(text=f"{number} ".encode().ljust(2048)), [fleet.backends[number % 2]])
        choice.begin()
        choice.begun = time.monotonic() - 20 * 1.0 * slowness
        choice.sent = choice.begun - (1.0 + 8 * 0.5) * slowness
        fleet.note_pace(choice, 21)
    fleet.note_pace(fleet.choose(Prompt(text=b"y" * 2048), fleet.backends), 0)  # it has ended without a part
    decision = fleet.choose(Prompt(text=b"x" * 2048), fleet.backends).decision
    fast, slow = decision.replicas
    assert fast.number == 0
    assert (slow.request_cost, slow.chunk_cost) > (2 * fast.request_cost, 2 * fast.chunk_cost)
    assert fast.request_cost / fast.chunk_cost == pytest.approx(2.0, rel=0.3)


def test_a_choice_can_be_explained(site: Site) -> None:
    backend = site.add_backend()
    site.start_router()
    headers = {"x-shardline-route": "1"}
    answer = site.client.post("/v1/completions", json={"model": "m"}, headers=headers)
    assert answer.headers["x-shardline-route"].startswith(f"{backend.url}; policy=least_work; attempt=1")
    assert "x-shardline-route" not in backend.calls[0].headers
    assert "x-shardline-route" not in site.ask().headers


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_was_expected_in_caches_is_compared_with_what_was_there(site: Site, is_stream: bool) -> None:
    usage = {"usage": {"prompt_tokens": 80, "prompt_tokens_details": {"cached_tokens": 20}}}

    async def with_usage(call: Call) -> None:
        if not is_stream:
            await call.answer(200, usage)
            return
        await call.begin_stream()
        await call.send_event("one")
        await call.send_event(json.dumps(usage))
        await call.end_stream()

    backend = site.add_backend(with_usage)
    site.start_router()
    for _ in range(2):
        assert site.ask("x" * 1024, stream=is_stream).status_code == 200
    metrics = site.client.get("/metrics").text
    for kind, count in (("all", 8.0), ("expected", 4.0), ("found", 2.0)):
        assert f'prompt_chunks_total{{backend="{backend.url}",kind="{kind}"}} {count}' in metrics
    assert site.fleet.backends[0].pending_chunks == 0


def test_what_one_backend_keeps_is_found(site: Site) -> None:
    async def not_here(call: Call) -> None:
        await call.answer(404, {"error": {"message": "unknown", "type": "x", "param": None, "code": None}})

    async def here(call: Call) -> None:
        await call.answer(200, {"id": "resp_1"})

    site.add_backend(not_here)
    site.add_backend(here)
    site.start_router()
    assert site.client.get("/v1/responses/resp_1").json() == {"id": "resp_1"}
    for behave, status in ((fail, 500), (cut, 502), (not_here, 404)):
        site.backends[1].behave = behave
        assert site.client.get("/v1/responses/resp_1").status_code == status, "who does not answer may have it"


def test_files_and_batches_are_sought_at_backends_that_drain_are_full_or_away(site: Site) -> None:
    async def not_here(call: Call) -> None:
        await call.answer(404, {"error": {"message": "unknown", "type": "x", "param": None, "code": None}})

    site.add_backend(not_here)
    keeper = site.add_backend()
    site.start_router()
    asks = [("POST", "/v1/batches"), ("POST", "/v1/batches/batch_1/cancel"), ("GET", "/v1/files/file_1")]

    def ask() -> list[int]:
        return [site.client.request(*one, content=b"{}").status_code for one in asks]

    assert ask() == [200] * 3
    site.fleet.backends[1].busy_until = time.monotonic() + 60.0
    assert ask() == [200] * 3
    site.fleet.backends[1].is_draining = True
    assert ask() == [200] * 3
    keeper.ready = 503
    site.wait_for(lambda: not site.fleet.backends[1].is_ready)
    assert ask() == [503] * 3
    assert f"{keeper.url}, which may, is down now" in site.client.get("/v1/files/file_1").json()["error"]["message"]
    site.run(_remove(site, keeper.url))
    assert ask() == [404] * 3


def test_an_answer_to_no_question_is_nobody_s(site: Site) -> None:
    async def answer_twice(call: Call) -> None:
        await say_name(call)
        await call.answer(200, {"prompt": "for nobody"})

    site.add_backend(answer_twice)
    site.start_router()
    for number in range(20):
        assert site.ask(f"{number}").json()["prompt"] == f"{number}"


def test_metrics_forget_backends_that_are_gone(site: Site) -> None:
    gone = site.add_backend().url
    site.start_router()
    assert site.ask().status_code == 200
    assert f'requests_total{{backend="{gone}",outcome="ok"}} 1.0' in site.client.get("/metrics").text
    site.run(_remove(site, gone))
    assert gone not in site.client.get("/metrics").text


async def _remove(site: Site, url: str) -> None:
    site.fleet.remove(url)


def test_kept_connections_that_a_backend_closes_cost_no_request(site: Site) -> None:
    async def answer_and_close(call: Call) -> None:
        await say_name(call)
        call.writer.close()

    site.add_backend(answer_and_close)
    site.start_router(retries=0)
    assert [site.ask().status_code for _ in range(20)] == [200] * 20


@pytest.mark.parametrize("body", [b"", b"[", b"[1]", b'{"model": 5}', b'{"messages": "\xff"}'])
def test_bodies_are_the_backends_to_judge(site: Site, body: bytes) -> None:
    backend = site.add_backend(refuse)
    site.start_router()
    assert site.client.post("/v1/chat/completions", content=body).status_code == 400
    assert backend.calls[0].body == body


def test_a_large_body_is_refused(site: Site) -> None:
    backend = site.add_backend()
    site.start_router(ServerConfig(max_request_bytes=1000, disable_access_log=True))
    assert site.ask("x" * 2000).status_code == 413
    assert not backend.calls


def test_pages_of_allowed_origins_read_answers_also_where_a_json_list_names_them(site: Site) -> None:
    site.add_backend()
    site.start_router(ServerConfig(allowed_origins=('["https://chat.example.org"]',), disable_access_log=True))
    answer = site.client.get("/health", headers={"Origin": "https://chat.example.org"})
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.org"
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    other = site.client.get("/health", headers={"Origin": "https://evil.example.org"})
    assert "access-control-allow-origin" not in other.headers
