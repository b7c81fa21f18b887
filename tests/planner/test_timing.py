"""Step times, fits and validation, on rows whose truth is known."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shardline.cli.main import main
from shardline.planner.fitting import fit_constants
from shardline.planner.hardware import known_gpus
from shardline.planner.layout import Layout
from shardline.planner.rows import actual_layout, read_rows
from shardline.planner.timing import StepLoad, loop_latency, shipped_timing
from shardline.planner.validate import collect_samples, summarize, validate

_COLUMNS = ("tier", "model", "precision", "gpu", "tp", "pp", "ep", "dp", "engine", "isl", "osl", "concurrency_or_rate",
            "ttft_ms", "tpot_ms", "output_tok_s", "notes")  # fmt: skip
_MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B")


def write_rows(path: Path) -> None:
    """Rows that the shipped constants of vLLM predict exactly."""
    table = [
        {"tier": "A", "model": model, "precision": "bf16", "gpu": gpu, "tp": tp, "pp": 1, "ep": 1, "dp": 1,
         "engine": "vllm", "isl": 1024, "osl": 256, "concurrency_or_rate": running}
        for model in _MODELS for gpu in ("h100_sxm", "h200_sxm") for tp in (2, 4, 8) for running in (4, 32, 128)
    ]  # fmt: skip
    _write(path, table)
    constants = shipped_timing()["vllm"].constants
    samples, _ = collect_samples([replace(row) for row in read_rows(path)[0]], known_gpus())
    for one, sample in zip(table, samples, strict=True):
        latency = loop_latency(sample.steps, constants)
        one |= {"ttft_ms": 1e3 * latency.ttft, "tpot_ms": 1e3 * latency.tpot}
        one |= {"output_tok_s": latency.output_tokens_per_second}
    _write(path, [*table, {**table[0], "engine": "vllm", "tp": ""}, {**table[0], "gpu": "h999"}])


def _write(path: Path, table: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, _COLUMNS)
        writer.writeheader()
        writer.writerows(table)


def test_a_fit_finds_the_constants_that_made_the_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.csv")
    samples, skipped = collect_samples(read_rows(tmp_path / "rows.csv")[0], known_gpus())
    assert len(samples) == 54
    assert [one.names_layout for one in skipped] == [True], "the GPU that nobody knows"
    fitted = fit_constants(samples)
    errors = sorted(abs(loop_latency(one.steps, fitted).tpot / (one.row.tpot or 0) - 1) for one in samples)
    assert errors[len(errors) // 2] < 0.05
    assert errors[-1] < 0.15


def test_held_out_rows_are_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    write_rows(path)
    summary = summarize(validate(path, known_gpus()))
    assert summary["tpot"]["n"] == 2 * 54, "once without its model, once without its GPU"
    assert summary["tpot"]["missed"] == 1
    assert summary["tpot"]["median_ape"] < 0.1
    assert summary["calibrated"]["tpot"]["n"] == 2 * 18, "each machine's middle load calibrates it"
    assert summary["calibrated"]["tpot"]["median_ape"] < 0.001, "constants that are right stay"
    assert {"model", "gpu", "engine", "tier"} <= {key for entry in summary["by"] for key in entry}
    assert len(summary["refitted"]) == len(_MODELS) + 2
    assert main(["plan", "--validate", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary
    assert main(["plan", "--validate", str(path)]) == 0
    assert "tpot" in capsys.readouterr().out


def test_rows_with_sizes_multiplied_into_each_other_are_corrected() -> None:
    wrong = Layout("sglang", 64, whole_experts=True, weights="fp8")
    assert actual_layout(wrong, 8).tensor == 8
    assert actual_layout(replace(wrong, tensor=8), 8).tensor == 8
    assert actual_layout(Layout("trtllm", 1, 1, 64, True), 8).data == 8


def test_a_step_is_one_product() -> None:
    """A mixed step reads the weights once: it is shorter than a prefill step and a decode step after each other."""
    constants = shipped_timing()["vllm"].constants
    decode = StepLoad(0.01, 0.002, 0.0001, 0.0, 0, 32, 0, 8)
    prefill = StepLoad(0.01, 0.0, 0.004, 0.0, 0, 32, 0, 0)
    mixed = StepLoad(0.01, 0.002, 0.0041, 0.0, 0, 32, 0, 8)
    assert mixed.seconds(constants) < 0.75 * (decode.seconds(constants) + prefill.seconds(constants))
    assert decode.bound_by(constants) == "weights"
    assert decode._replace(arithmetic=1.0).bound_by(constants) == "arithmetic"
    assert decode._replace(exchange=1.0).bound_by(constants) == "links"


def test_constants_are_physical() -> None:
    for engine, timing in shipped_timing().items():
        values = asdict(timing.constants)
        assert all(0.3 < values[name] <= 1.2 for name in ("memory", "cache", "compute", "link")), engine
        assert all(0 <= values[name] < 1e-3 for name in ("message", "layer", "expert_layer", "request")), engine
        for low, high in timing.spread.values():
            assert 0 < low < 1 < high
