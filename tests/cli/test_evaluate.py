"""`shardline evaluate`: its figures for a text of the user and for the demo model's conversations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardline.checkpoints.hub import DEMO_FOLDER
from shardline.cli.main import main
from shardline.runtime.scoring import kl_divergences
from tests.runtime.loader.stored_checkpoints import write_checkpoint
from tests.runtime.loader.stored_formats import FORMATS


@pytest.mark.e2e
@pytest.mark.parametrize(("scheme", "agreement"), [("none", 1.0), ("int8", 0.99), ("int4", 0.98)])
def test_the_demo_model_by_its_conversations(
    scheme: str, agreement: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "quality.json"
    assert main(["evaluate", "--quantization", scheme, "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    assert figures["num_tokens"] > 500
    assert figures["top1_agreement"] >= agreement
    assert figures["reference_perplexity"] < 1.02
    assert figures["perplexity"] < 1.02
    assert (figures["max_difference"] == 0) == (figures["kl_divergence"] == 0) == (scheme == "none")
    lines = capsys.readouterr().out
    assert f"{100 * figures['top1_agreement']:.2f}%" in lines
    assert f"KL divergence          mean {figures['kl_divergence']:.5f}" in lines


def test_divergences_are_those_of_the_distributions() -> None:
    tested, expected = torch.randn(2, 5, 300, generator=torch.Generator().manual_seed(0)).mul(3).log_softmax(2)
    found = torch.nn.functional.kl_div(tested.double(), expected.double(), reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(kl_divergences(tested, expected), found, atol=1e-6, rtol=1e-5)


@pytest.mark.e2e
def test_the_demo_model_with_keys_and_values_in_int8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "quality.json"
    assert main(["evaluate", "--kv-cache-dtype", "int8", "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    assert figures["top1_agreement"] >= 0.99
    assert figures["perplexity"] < 1.02
    assert figures["max_difference"] > 0
    assert "KV in int8" in capsys.readouterr().out


@pytest.mark.e2e
def test_a_text_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Join two or more pathname components. " * 100)
    assert main(["evaluate", "--quantization", "int8", "--text", str(text)]) == 0
    assert "int8 against the model as it is" in capsys.readouterr().out


@pytest.mark.e2e
def test_a_quantized_checkpoint_against_the_model_that_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(DEMO_FOLDER, tmp_path / "packed", tmp_path / "plain", FORMATS["fbgemm"])
    report = tmp_path / "quality.json"
    words = ["--against", "demo", "--quantization", "fp8_w8a8", "--json", str(report)]
    assert main(["evaluate", str(tmp_path / "packed"), *words]) == 0
    figures = json.loads(report.read_text())
    assert figures["reference_perplexity"] < 1.02
    assert figures["perplexity"] < 1.05
    assert figures["max_difference"] > 0
    assert "fp8_w8a8 against demo, over" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-tp 2", "evaluate runs on one rank"),
        ("--text EMPTY", "is too short"),
        ("--text MISSING", "No such file"),
        ("--text BINARY", "cannot read"),
        ("--json no-folder/figures.json", "its folder does not exist"),
    ],
)
def test_mistakes_are_named(words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "EMPTY").touch()
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe")
    arguments = [str(tmp_path / word) if word.isupper() else word for word in words.split()]
    assert main(["evaluate", *arguments]) == 2
    assert message in capsys.readouterr().err
