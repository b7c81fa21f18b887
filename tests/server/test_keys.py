"""The keys that clients must send, where they come from, and what goes without."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from shardline.cli.main import main
from shardline.config.server import ServerConfig
from tests.server.conftest import serve


def test_keys() -> None:
    with serve(ServerConfig(api_key=("one", "two"))) as running, running.http() as http:
        for key in ("one", "two"):
            with running.openai(key) as client:
                assert client.models.list().data
        with running.openai("three") as client, pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
        missing = http.post("/v1/completions", json={"prompt": "Hi"})
        assert missing.status_code == 401
        assert "didn't provide an API key" in missing.json()["error"]["message"]
        for path in ("/tokenize", "/detokenize", "/openapi.json", "/v1/models", "/nowhere"):
            assert http.get(path).status_code == 401
        for header in ("Bearer", "Basic one", "one", "Bearer onetwo", "Bearer \xff"):
            assert http.get("/v1/models", headers={b"Authorization": header.encode("latin-1")}).status_code == 401
        for path in ("/health", "/live", "/ready", "/ping", "/version", "/metrics"):
            assert http.get(path).status_code == 200


def test_requests_have_the_owner_of_their_key() -> None:
    with serve(ServerConfig(api_key=("one", "two"))) as running, running.http() as http:
        for header in ({"x-api-key": "one"}, {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}):
            assert http.post("/v1/completions", json={"prompt": "Hi"}, headers=header).status_code == 200
        owners = [request.owner for request in running.engine.requests]
    assert owners[0] == owners[1] != owners[2]
    assert not any(part in owner for owner in owners for part in ("one", "two"))
    with serve(ServerConfig()) as running, running.http() as http:
        for headers in ({}, {"Authorization": "Bearer one"}):
            http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
        nobody, somebody = (request.owner for request in running.engine.requests)
    assert (nobody, bool(somebody), somebody in owners) == ("", True, True)


def test_a_file_of_keys_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\nfirst\n\n")
    config = ServerConfig(api_key_file=str(file), admin_api_key="root")
    with serve(config) as running, running.http() as http:

        def status(key: str, path: str = "/v1/models") -> int:
            return http.get(path, headers={"Authorization": f"Bearer {key}"}).status_code

        assert (status("first"), status("second"), status("root")) == (200, 401, 200)
        assert (status("first", "/requests/x"), status("root", "/requests/x")) == (401, 404)
        file.write_text("second\n")
        assert status("first") == 200
        running.in_loop(running.service.keys.reload)
        assert (status("first"), status("second")) == (401, 200)
        file.write_text("\n")
        running.in_loop(running.service.keys.reload)
        assert status("second") == 200, "a file without a key changes nothing"


def test_an_admin_key_alone_leaves_the_rest_open() -> None:
    with serve(ServerConfig(admin_api_key="root")) as running, running.http() as http:
        assert http.get("/v1/models").status_code == 200
        assert http.get("/requests/x").status_code == 401


def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLINE_API_KEY", "secret")
    assert ServerConfig().keys == ("secret",)
    assert ServerConfig(api_key=("own",)).keys == ("own",)


def test_key_in_vllms_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with serve(ServerConfig()) as running, running.http() as http:
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
    monkeypatch.setenv("SHARDLINE_API_KEY", "secret")
    assert ServerConfig().keys == ("secret",)
    monkeypatch.setenv("SHARDLINE_API_KEY", "another")
    with pytest.raises(ValueError, match="SHARDLINE_API_KEY and VLLM_API_KEY are both set and differ"):
        ServerConfig()
    assert ServerConfig(api_key=("own",)).keys == ("own",), "a flag goes before both"


@pytest.mark.parametrize("name", ["VLLM_MAX_N_SEQUENCES", "VLLM_ADMIN_API_KEY", "VLLM_SSL_KEYFILE", "VLLM_AUTH"])
def test_a_protection_of_vllm_that_is_not_understood_ends_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    assert main(["serve"]) == 2
    error = capsys.readouterr().err
    assert name in error
    assert error.count("\n") == 1


def test_other_variables_of_vllm_are_let_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_HOST_IP", "VLLM_MEDIA_URL_ALLOW_REDIRECTS", "VLLM_ATTENTION_BACKEND", "VLLM_SERVICE_HOST"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("VLLM_SSL_KEYFILE", "")
    assert ServerConfig().keys == ()


def test_probes_need_no_key_behind_a_prefix() -> None:
    with serve(config=ServerConfig(root_path="/llm", api_key=("k",))) as running, running.http() as http:
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").status_code == 401
        assert http.get("/llm/v1/models").status_code == 401
