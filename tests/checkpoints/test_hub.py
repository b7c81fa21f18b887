"""What a user may call a model, and the answer where there is none."""

from __future__ import annotations

import errno
import json
import shutil
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from shardline.checkpoints import hub
from shardline.checkpoints.hub import resolve_model, resolve_tokenizer
from shardline.config.engine import HubAccess
from tests.models.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in two or more files."""
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"), max_shard_size="200KB")


class FakeHub:
    """Stands in for huggingface_hub: `error` is what the hub answers, `cached` the folder that the cache holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.error: Exception | None = None
        self.cached: Path | None = None
        self.remote: Path | None = None
        self.patterns: list[list[str]] = []
        self.revisions: list[str | None] = []
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self.model_info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))

    def model_info(self, repo_id: str, *, revision: str | None, timeout: float) -> Any:
        assert timeout <= 10
        if self.error is not None:
            raise self.error
        return huggingface_hub.hf_api.ModelInfo(id=repo_id, sha="c0ffee", tags=[])

    def snapshot_download(self, repo_id: str, *, local_files_only: bool, **options: Any) -> str:
        folder = self.cached if local_files_only else self.remote
        if folder is None:
            raise errors.LocalEntryNotFoundError("nothing in the cache")
        self.revisions.append(options["revision"])
        self.patterns.append(options["allow_patterns"])
        return str(folder)


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    return FakeHub(monkeypatch, tmp_path / "cache")


def _http_error(kind: type[errors.HfHubHTTPError], message: str) -> Exception:
    # Their constructors want a response of whichever HTTP client this version of the library uses.
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    return error


def test_a_folder(model: Path) -> None:
    files = resolve_model(str(model))
    assert files.folder == model
    assert files.model_type == "qwen2"
    assert files.eos_token_ids == (3,)
    assert [file.name for file in files.weight_files] == sorted(path.name for path in model.glob("*.safetensors"))
    assert resolve_tokenizer(str(model)) == model


def test_without_weights(model: Path, tmp_path: Path) -> None:
    shutil.copy(model / "config.json", tmp_path)
    files = resolve_model(str(tmp_path), weights=False)
    assert files.weight_files == ()
    assert files.generation_config == {}
    assert files.eos_token_ids == (3,)
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(("eos", "expected"), [(5, (5,)), ([5, 6], (5, 6)), (None, ())])
def test_eos_tokens(model: Path, tmp_path: Path, eos: Any, expected: tuple[int, ...]) -> None:
    shutil.copy(model / "config.json", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert resolve_model(str(tmp_path), weights=False).eos_token_ids == expected


def test_the_demo_model_is_in_the_package(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    assert hub.DEMO_FOLDER.parent.name == "shardline"
    monkeypatch.setattr(hub, "DEMO_FOLDER", model)
    assert resolve_model("demo").folder == model


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "there is no such folder; give a folder with config.json"),
        ("/nowhere/at/all", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
        ("", "there is no such folder"),
        ("two words", "neither an existing folder nor a hub id like"),
        ("-dash-", "neither an existing folder nor a hub id like"),
        (__file__, "is a file; give a GGUF file, the folder"),
        ("./nowhere.gguf", "there is no such file"),
    ],
)
def test_what_can_be_no_model(name: str, message: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match=message):
        resolve_model(name)
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json"),
        ("{", r"config\.json is corrupt: Expecting"),
        ("[]", "must hold an object, not list"),
        (b"\xff\xfe", r"config\.json is corrupt"),
        ("{}", "has no model_type"),
        ('{"model_type": "lama"}', "did you mean llama"),
    ],
)
def test_broken_folders(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=message):
        resolve_model(str(tmp_path))


def test_from_the_hub(fake_hub: FakeHub, model: Path) -> None:
    fake_hub.remote = model
    assert resolve_model("some/model", "main").folder == model
    configs, everything = fake_hub.patterns
    assert "config.json" in configs
    assert "*.safetensors" not in configs
    assert "*.safetensors" in everything
    assert fake_hub.revisions == ["main", model.name], "the weights are those of the commit that the config is from"
    fake_hub.patterns.clear()
    resolve_model("some/model", weights=False)
    assert fake_hub.patterns == [configs]


def test_an_unsupported_model_is_refused_before_its_weights_are_downloaded(fake_hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    fake_hub.remote = tmp_path
    with pytest.raises(ValueError, match="'mamba' is not supported"):
        resolve_model("some/model")
    assert len(fake_hub.patterns) == 1


def test_the_cache_serves_when_the_hub_does_not(fake_hub: FakeHub, model: Path) -> None:
    fake_hub.error = errors.OfflineModeIsEnabled("offline")
    fake_hub.cached = model
    assert resolve_model("some/model").folder == model


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_http_error(errors.RepositoryNotFoundError, "404"), "the hub has none of that name"),
        (_http_error(errors.GatedRepoError, "403"), "is gated: accept its terms at https://huggingface.co/some/model"),
        (_http_error(errors.RevisionNotFoundError, "404"), "has no revision 'v9'"),
        (_http_error(errors.HfHubHTTPError, "503 try later\nlong"), "the hub answered: 503 try later$"),
        (
            errors.OfflineModeIsEnabled("offline"),
            "while HF_HUB_OFFLINE is set; unset it to download the model, or give a folder",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), r"the disk of .*cache is full; free some space"),
        (
            ConnectionError("no route"),
            r"cannot be reached \(ConnectionError: no route\), nor is .*; check the network .* and try again, or",
        ),
        (TimeoutError(), r"cannot be reached \(TimeoutError: no message\)"),
    ],
)
def test_what_the_hub_may_answer(fake_hub: FakeHub, error: Exception, message: str) -> None:
    fake_hub.error = error
    with pytest.raises(ValueError, match=message) as caught:
        resolve_model("some/model", "v9")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=message):
        resolve_tokenizer("some/model", "v9")


def test_values_of_a_configuration_are_replaced(model: Path, tmp_path: Path) -> None:
    overrides = {"rope_parameters": {"rope_theta": 7.0}, "new": {"a": 1}}
    plain, other = resolve_model(str(model)), resolve_model(str(model), overrides=overrides)
    rope = plain.config["rope_parameters"]
    assert other.config == {**plain.config, "rope_parameters": {**rope, "rope_theta": 7.0}, "new": {"a": 1}}
    assert plain.config["rope_parameters"] == rope


def test_a_generation_config_may_lie_elsewhere(model: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8], "temperature": 0.5}')
    assert resolve_model(str(model), generation_config=str(tmp_path)).eos_token_ids == (7, 8)
    with pytest.raises(ValueError, match="--generation-config /no/such must be a folder"):
        resolve_model(str(model), generation_config="/no/such")


def test_the_hub_gets_the_token_and_the_folder(fake_hub: FakeHub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub.remote = model
    seen: list[dict[str, Any]] = []

    def download(repo_id: str, **options: Any) -> str:
        seen.append(options)
        return fake_hub.snapshot_download(repo_id, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    access = HubAccess("secret", "/folder")
    assert "secret" not in repr(access)
    resolve_model("some/model", hub=access)
    assert {(options["token"], options["cache_dir"]) for options in seen} == {("secret", "/folder")}
