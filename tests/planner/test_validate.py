"""`plan --validate FILE`: a user's measurements against the shipped constants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardline.cli.main import main
from shardline.planner.catalog import find_model
from shardline.planner.cluster import parse_cluster
from shardline.planner.hardware import GIB, known_gpus
from shardline.planner.layout import Demand, Layout
from shardline.planner.search import Option, evaluate
from shardline.planner.validate import QUANTITIES, validate

LLAMA_8B = "meta-llama/Llama-3.1-8B-Instruct"
LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"
COLUMNS = "model,gpus,engine,tp,weights,kv,running,ttft_ms,tpot_ms,output_tok_s,kv_gib,kv_tokens,notes"


def prediction(model: str, gpus: str, layout: Layout, running: int) -> Option:
    return evaluate(find_model(model), layout, parse_cluster(gpus, known_gpus()), Demand(8192, running=running))


def row(name: str, gpus: str, layout: Layout, running: int, factor: float = 1.0) -> str:
    """A measurement that is `factor` times the prediction."""
    option = prediction(name, gpus, layout, running)
    assert option.speed is not None
    speed, memory = option.speed, option.fit
    values = (
        1e3 * speed.ttft.p50,
        1e3 * speed.tpot.p50,
        speed.output_tok_s.p50,
        memory.kv_bytes / GIB,
        memory.kv_tokens,
    )
    cells = (layout.engine, layout.tensor, layout.weights, layout.kv, running, *(factor * one for one in values))
    return f"{name},{gpus},{','.join(map(str, cells))},"


def write(path: Path, *rows: str) -> Path:
    path.write_text("\n".join((COLUMNS, *rows)) + "\n")
    return path


def test_shipped_constants_predict_each_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(
        tmp_path / "mine.csv",
        row(LLAMA_70B, "4xH100", Layout("vllm", 4, weights="fp8"), 16),
        row(LLAMA_8B, "L40S", Layout("shardline"), 8, 0.5),
        f"{LLAMA_8B},L40S,,,,,,,,,44.5,,by a start-up log",
        f"{LLAMA_70B},1xL4,,,,,,,10,,,,",
        f"{LLAMA_8B},9xH999,,,,,,,10,,,,",
    )
    assert main(["plan", "--validate", str(path), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    exact, halved, log = summary["rows"]
    assert all(exact[name] == 0 for name in QUANTITIES)
    assert all(halved[name] == pytest.approx(1) for name in QUANTITIES)
    assert set(log) == {"line", "model", "kv_gib"}
    assert [summary[name]["n"] for name in QUANTITIES] == [2, 2, 2, 3, 2]
    assert summary["tpot_ms"]["coverage"] == 0.5
    assert "coverage" not in summary["kv_gib"], "memory has no interval"
    assert [one["line"] for one in summary["skipped"]] == [5, 6]
    assert "GiB are missing" in summary["skipped"][0]["why"]
    assert main(["plan", "--validate", str(path)]) == 0
    text = capsys.readouterr().out
    assert "+100.0%" in text
    assert "no prediction of line 6: unknown GPU 'H999'" in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "the columns model and gpus"),
        ("model,tp\nx,1\n", "the columns model and gpus"),
        ("model,gpus,speed\nx,L4,1\n", "unknown column 'speed'; known are model, gpus"),
    ],
)
def test_a_file_of_another_form_is_refused(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=says):
        validate(path, known_gpus())


def test_a_wrong_cell_costs_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"model,gpus,tp,tpot_ms\n{LLAMA_8B},L40S,many,10\n{LLAMA_8B},L40S,1,-3\n{LLAMA_8B},L40S,1,30\n")
    errors, skipped = validate(path, known_gpus())
    assert [one.line for one in errors] == [4]
    assert "tp" in skipped[2]
    assert "tpot_ms must be above zero" in skipped[3]
