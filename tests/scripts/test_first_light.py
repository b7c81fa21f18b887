"""The page of a card, whatever its parts found; the parts themselves run by `make gpu-first-light`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from perf.gpu import first_light

ON = {"device": "cuda", "kernels": "auto"}
REPORT = {
    "ceilings": {"seconds": 3.0, "result": {"card": "NVIDIA H100 80GB HBM3", "flops": 7.0e14}},
    "proof": {"seconds": 20.0, "result": {"llama": {"tried": 2, "failed": {"add (width 64)": "is | wrong"}}}},
    "parity": {"seconds": 9.0, "result": {"llama": {"ok": True}, "mixtral": "Traceback\n  line\nValueError: no"}},
    "server": {"seconds": 4.0, "error": "not finished in 240 s"},
    "engine": {"seconds": 5.0, "result": {"8B": {"decode": {"of_ceiling": 0.8, "bar": 0.85, "met": False}}}},
}


def test_the_page_says_what_failed() -> None:
    assert first_light.failed_parts(REPORT) == ["proof", "parity", "server"], "a missed bar is not a failure"
    page = first_light.page_of(REPORT, ON, {"torch": "2.13.0"}).splitlines()
    assert page[0] == "# NVIDIA H100 80GB HBM3"
    assert "Parts that failed: proof, parity, server." in page
    assert "| llama / failed | add (width 64) is / wrong |" in page
    assert "| mixtral | ValueError: no |" in page
    assert "| server | not finished in 240 s |" in page
    assert "| 8B / decode | of_ceiling 0.8, bar 0.85, met False |" in page
    assert first_light.page_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3.md"


@pytest.mark.parametrize("words", [["--device", "xpu"], ["--parts", "ceilings,nothing"]])
def test_what_is_not_there_is_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["first_light", *words, "--page", str(tmp_path / "page.md")])
    assert first_light.main() == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "page.md").exists()


def test_a_part_that_crashes_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        name = command[command.index("--part") + 1]
        if name == "proof":
            raise subprocess.TimeoutExpired(command, 1.0)
        Path(command[command.index("--output") + 1]).write_text('{"card": "A card", "ok": true}')
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    page = tmp_path / "page.md"
    words = ["first_light", "--device", "cpu", "--parts", "ceilings,proof,server", "--page", str(page)]
    monkeypatch.setattr(sys, "argv", words)
    assert first_light.main() == 1
    text = page.read_text()
    assert text.startswith("# A card\n")
    assert "Parts that failed: proof." in text
