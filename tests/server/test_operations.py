"""Endpoints and headers for operators, and what a server takes from its flags."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import httpx
import pytest

from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from tests.server.conftest import Running, serve

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
MIDDLEWARE = """
class Tagging:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def tagged(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-tag", b"one")]
            await send(message)

        await self.app(scope, receive, tagged)


async def teapot(request, call_next):
    answer = await call_next(request)
    answer.headers["x-pot"] = request.url.path
    return answer


number = 3
"""


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client with the admin key, of a server to which many flags were given."""
    folder = tmp_path_factory.mktemp("middleware")
    (folder / "users_middleware.py").write_text(MIDDLEWARE)
    config = ServerConfig(
        admin_api_key="hidden-admin",
        api_key=("hidden-key",),
        middleware=("users_middleware.Tagging", "users_middleware.teapot"),
        response_role="teacher",
        enable_force_include_usage=True,
        disable_fastapi_docs=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        engine = EngineConfig.from_options(hf_token="hf_hidden", max_num_seqs=7)
        headers = {"Authorization": "Bearer hidden-admin"}
        with serve(config, engine_config=engine) as running, running.http(headers=headers) as http:
            yield http
    sys.modules.pop("users_middleware")


def test_invocations_are_answered_by_the_endpoint_of_their_body(http: httpx.Client) -> None:
    assert http.post("/invocations", json=CHAT).json()["object"] == "chat.completion"
    assert http.post("/invocations", json={"prompt": "Hi"}).json()["object"] == "text_completion"
    refused = http.post("/invocations", json={"input": "Hi"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
    with http.stream("POST", "/invocations", json={**CHAT, "stream": True}) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"messages": null}', b'{"n": 1}', b"\xff", b"{" * 100_000])
def test_other_invocations_are_refused(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/invocations", content=body)
    assert answer.status_code == 400
    assert "Cannot find a handler" in answer.json()["error"]["message"]


def test_the_load_is_reported_to_those_who_ask(http: httpx.Client) -> None:
    reports = {
        name: http.post("/v1/completions", json={"prompt": "Hi"}, headers={"endpoint-load-metrics-format": name})
        for name in ("TEXT", "json", "protobuf")
    }
    named = "named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0.0"
    assert reports["TEXT"].headers["endpoint-load-metrics"] == f"TEXT {named}"
    assert reports["json"].headers["endpoint-load-metrics"].startswith('JSON {"named_metrics":{"kv_cache_usage_perc":')
    assert "endpoint-load-metrics" not in reports["protobuf"].headers
    assert "endpoint-load-metrics" not in http.post("/v1/completions", json={"prompt": "Hi"}).headers


def test_a_reset_reaches_the_engine(shared: Running, http: httpx.Client) -> None:
    before = shared.engine.num_resets
    assert http.post("/reset_prefix_cache").json() == {"success": True}
    assert shared.engine.num_resets == before + 1


def test_the_configuration_is_shown_without_secrets(configured: httpx.Client) -> None:
    other = {"Authorization": "Bearer hidden-key"}
    assert configured.get("/server_info", headers=other).status_code == 401
    assert configured.post("/reset_prefix_cache", headers=other).status_code == 401
    answer = configured.get("/server_info?config_format=json")
    assert "hidden" not in answer.text
    assert answer.json()["vllm_config"]["scheduler"]["max_num_seqs"] == 7
    assert answer.json()["system_env"]["python"]
    assert configured.get("/server_info?config_format=xml").json()["error"]["param"] == "config_format"


@pytest.mark.slow
def test_the_documentation_loads_nothing(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "/v1/chat/completions" in page.text
    assert "<script" not in page.text
    assert "http://" not in page.text + page.headers["content-security-policy"]
    assert "https://" not in page.text


def test_the_documentation_can_be_left_out(configured: httpx.Client) -> None:
    assert {configured.get(path).status_code for path in ("/docs", "/openapi.json", "/redoc")} == {404}


def test_users_bring_middleware(configured: httpx.Client) -> None:
    answer = configured.get("/health")
    assert (answer.headers["x-tag"], answer.headers["x-pot"]) == ("one", "/health")


@pytest.mark.parametrize("path", ["no.such.module", "nothing", "shardline.limits.nothing", "shardline.__version__"])
def test_middleware_that_is_none_is_refused(path: str) -> None:
    from shardline.server.user_middleware import load_middleware

    with pytest.raises(ValueError, match=f"--middleware {path}"):
        load_middleware(ServerConfig(middleware=(path,)))


def test_answers_have_the_configured_role(configured: httpx.Client) -> None:
    def role(**fields: object) -> str:
        answer = configured.post("/v1/chat/completions", json={**CHAT, **fields})
        return str(answer.json()["choices"][0]["message"]["role"])

    assert role() == "teacher"
    assert role(add_generation_prompt=False) == "user"
    assert '"role":"teacher"' in configured.post("/v1/chat/completions", json={**CHAT, "stream": True}).text


def test_forced_usage_is_in_every_event(configured: httpx.Client) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hi"})):
        events = configured.post(path, json={**body, "stream": True}).text.split("\n\n")
        assert all('"usage":{' in event for event in events if event and "[DONE]" not in event)
