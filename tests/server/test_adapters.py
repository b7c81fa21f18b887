"""Adapters as models of requests, over a fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from shardline.api.adapters import Adapters
from shardline.checkpoints.description import read_model
from shardline.config.engine import EngineConfig, ModelConfig
from shardline.config.lora import LoRAConfig
from shardline.config.server import ServerConfig
from tests.models.adapters import make_adapter
from tests.models.checkpoints import make_checkpoint
from tests.server.conftest import Running, serve

ADMIN = {"Authorization": "Bearer boss"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and below `adapters` two that fit it and a broken one."""
    home = tmp_path_factory.mktemp("home")
    model = make_checkpoint("llama", home / "model")
    for number, name in enumerate("ab"):
        make_adapter(model, home / "adapters" / name, seed=number)
    (home / "adapters" / "broken").mkdir()
    (home / "adapters" / "broken" / "adapter_config.json").write_text("{")
    return home


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    """A server with adapter a, which may load those of the folder."""
    adapters = folder / "adapters"
    lora = LoRAConfig(enable_lora=True, lora_modules=(f"first={adapters / 'a'}",))
    config = ServerConfig(port=0, lora_root=str(adapters), admin_api_key="boss")
    with serve(config, engine_config=EngineConfig(lora=lora)) as server:
        spec = read_model(ModelConfig(model=str(folder / "model"))).spec()
        object.__setattr__(server.llm.model, "adapters", Adapters(lora, spec))
        yield server


def test_an_adapter_is_a_model(running: Running, folder: Path) -> None:
    running.engine.requests.clear()
    with running.openai() as client, running.http() as http:
        assert [model.id for model in client.models.list()] == ["demo", "first"]
        card = http.get("/v1/models/first").json()
        assert (card["parent"], card["root"]) == ("demo", str(folder / "adapters" / "a"))
        assert http.get("/v1/models/demo").json()["parent"] is None
        assert client.completions.create(model="first", prompt="a", max_tokens=1).model == "first"
        assert client.completions.create(model="demo", prompt="a", max_tokens=1).model == "demo"
        chat = [{"role": "user", "content": "a"}]
        assert client.chat.completions.create(model="first", messages=chat, max_tokens=1).model == "first"  # type: ignore[arg-type]
        assert client.responses.create(model="first", input="a", max_output_tokens=16).model == "first"
        message = {"model": "first", "messages": chat, "max_tokens": 2}
        assert http.post("/v1/messages", json=message).json()["model"] == "first"
        asked = [request.adapter.folder if request.adapter else "" for request in running.engine.requests]
        own = str(folder / "adapters" / "a")
        assert asked == [own, "", own, own, own]
        salts = {request.cache_salt for request in running.engine.requests}
        assert len(salts) == 2, "the prefixes of an adapter are its own"
        with pytest.raises(openai.NotFoundError, match="Served here: `demo`, `first`"):
            client.completions.create(model="second", prompt="a")


def test_adapters_come_and_go(running: Running) -> None:
    with running.http(headers=ADMIN) as http:

        def load(**body: object) -> httpx.Response:
            return http.post("/v1/load_lora_adapter", json=body)

        loaded = load(lora_name="second", lora_path="b")
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'second' added successfully.")
        assert load(lora_name="twin", lora_path="b", base_model_name="base").status_code == 200
        cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
        assert (cards["second"]["parent"], cards["twin"]["parent"]) == ("demo", "base")
        for model in ("second", "twin"):
            http.post("/v1/completions", json={"model": model, "prompt": "a", "max_tokens": 1})
        first, second = (request.adapter for request in running.engine.requests[-2:])
        assert first == second, "equal contents are one adapter"
        assert load(lora_name="second", lora_path="a").status_code == 400
        assert load(lora_name="second", lora_path="a", load_inplace=True).status_code == 200
        unloaded = http.post("/v1/unload_lora_adapter", json={"lora_name": "second"})
        assert unloaded.text == "Success: LoRA adapter 'second' removed successfully."
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "second"}).status_code == 404
        assert http.post("/v1/completions", json={"model": "second", "prompt": "a"}).status_code == 404
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "twin"}).status_code == 200


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("new", "broken", "adapter_config.json is malformed"),
        ("new", ".", "has no adapter_config.json"),
        ("new", "..", "must be a folder in"),
        ("new", "/etc", "must be a folder in"),
        ("new", "a\0b", "is no path"),
        ("new", "a" * 5000, "is no path"),
        ("demo", "b", "is the name of the served model"),
        ("", "b", "must have 1 to 256 characters"),
    ],
)
def test_what_cannot_be_loaded_is_one_400(running: Running, name: str, path: str, message: str) -> None:
    with running.http(headers=ADMIN) as http:
        answer = http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
        assert "\n" not in answer.json()["error"]["message"]
        assert list(running.llm.model.adapters.named) == ["first"]


def test_a_folder_that_is_not_there_is_a_404(running: Running) -> None:
    with running.http(headers=ADMIN) as http:
        for path in ("nowhere", "a/adapter_config.json"):
            answer = http.post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": path})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "adapter_not_found")


@pytest.mark.slow
def test_vllms_variable_opens_every_folder(running: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    other = {"lora_name": "other", "lora_path": str(folder / "adapters" / "b")}
    with serve(ServerConfig(port=0)) as anywhere, anywhere.http() as http:
        object.__setattr__(anywhere.llm.model, "adapters", running.llm.model.adapters)
        assert http.post("/v1/load_lora_adapter", json=other).text.startswith("Success")
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "other"}).status_code == 200
    with running.http(headers=ADMIN) as http:  # --lora-root counts more
        answer = http.post("/v1/load_lora_adapter", json={**other, "lora_path": "/etc"})
        assert "must be a folder in" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_loading_needs_the_admin_key_and_a_root(running: Running) -> None:
    body = {"lora_name": "new", "lora_path": "b"}
    with running.http() as http:
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 401
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "first"}).status_code == 401
    with serve(ServerConfig(port=0)) as plain, plain.http() as http:
        assert "--lora-root" in http.post("/v1/load_lora_adapter", json=body).json()["error"]["message"]
    with serve(ServerConfig(port=0, lora_root="/tmp")) as plain, plain.http() as http:
        assert "--enable-lora" in http.post("/v1/load_lora_adapter", json=body).json()["error"]["message"]


def test_an_adapter_of_the_start_that_cannot_be_used_names_its_flag(running: Running, folder: Path) -> None:
    lora = LoRAConfig(enable_lora=True, lora_modules=(f"bad={folder / 'adapters' / 'broken'}",))
    with pytest.raises(ValueError, match=r"lora_modules bad: the adapter in .* is malformed"):
        Adapters(lora, running.llm.model.adapters._spec)
