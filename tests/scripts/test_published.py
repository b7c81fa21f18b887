"""Published rows: how they are read, and the constants that are fitted to them."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from scripts.published import row_fields
from scripts.published.fitting import fit_constants
from scripts.published.held_out import collect_samples, format_summary, summarize, validate
from scripts.published.offline import bench_limits
from scripts.published.rows import actual_layout, decoding_part, read_rows
from scripts.published.start_up_logs import format_memory, summarize_memory, validate_memory

from shardline.planner import catalog
from shardline.planner.catalog import find_model
from shardline.planner.cluster import parse_cluster
from shardline.planner.hardware import known_gpus
from shardline.planner.layout import Layout
from shardline.planner.timing import loop_latency, shipped_timing

_COLUMNS = ("tier", "model", "precision", "gpu", "tp", "pp", "ep", "dp", "engine", "isl", "osl", "concurrency_or_rate",
            "ttft_ms", "tpot_ms", "output_tok_s", "notes")  # fmt: skip


_MODELS = ("meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B")


def write_rows(path: Path) -> None:
    """Rows that the shipped constants of vLLM predict exactly."""
    table: list[dict[str, object]] = [
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


def test_held_out_rows_are_predicted(tmp_path: Path) -> None:
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
    assert "tpot, calibrated at another load" in format_summary(summary)


def test_rows_with_sizes_multiplied_into_each_other_are_corrected() -> None:
    wrong = Layout("sglang", 64, whole_experts=True, weights="fp8")
    assert actual_layout(wrong, 8).tensor == 8
    assert actual_layout(replace(wrong, tensor=8), 8).tensor == 8
    assert actual_layout(Layout("trtllm", 1, 1, 64, True), 8).data == 8


def test_rows_say_the_same_in_many_ways(tmp_path: Path) -> None:
    """Groups of GPUs for prompts, one prompt alone, an engine without rows of its own, and other names of formats."""
    plain = {"tier": "A", "model": _MODELS[0], "precision": "fp16", "gpu": "NVIDIA H100 80GB HBM3", "tp": 1,
             "engine": "TensorRT-LLM", "isl": 8192, "osl": 128, "concurrency_or_rate": 32, "tpot_ms": 10}  # fmt: skip
    groups = {**plain, "engine": "vllm P/D", "gpu": "H100/H200 (not stated)", "dp": "8P+4D"}
    alone = {**plain, "engine": "TGI", "precision": "awq", "concurrency_or_rate": "", "osl": 1, "tpot_ms": "",
             "load_type": "single-request prefill", "total_tok_s": 16384}  # fmt: skip
    with (tmp_path / "rows.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [*_COLUMNS, "load_type", "total_tok_s"])
        writer.writeheader()
        writer.writerows([plain, groups, alone])
    rows, skipped = read_rows(tmp_path / "rows.csv")
    assert not skipped
    assert [(one.engine, one.layout.weights) for one in rows] == [
        ("trtllm", "bf16"),
        ("vllm", "bf16"),
        ("vllm", "int4"),
    ]
    assert [(one.layout.data, one.prompts_apart) for one in rows] == [(1, False), (4, True), (1, False)]
    assert (rows[2].running, rows[2].ttft) == (1.0, 0.5)
    assert len(collect_samples(rows, known_gpus())[0]) == 3


@pytest.mark.parametrize(
    ("fields", "layout", "load"),
    [
        ({"tp": "TP4", "concurrency_or_rate": "1,024"}, (4, 1, 1, False), (1024, None)),
        ({"tp": "", "n_gpus": "1", "concurrency_or_rate": "c=64"}, (1, 1, 1, False), (64, None)),
        ({"tp": "", "n_gpus": "8", "dp": "4", "ep": "8"}, (2, 1, 4, True), (None, None)),
        ({"tp": "", "n_gpus": "4", "ep": "4", "concurrency_or_rate": "100 per GPU"}, (1, 1, 4, True), (400, None)),
        ({"tp": "", "dp": "8xDEP2 P + DEP8 D", "concurrency_or_rate": "inf"}, (1, 1, 8, True), (None, None)),
        ({"tp": "", "ep": "32P/72D", "load_type": "max"}, (1, 1, 72, True), (None, None)),
        ({"tp": "2", "dp": "8", "load_type": "poisson 3..60 QPS ramp", "concurrency_or_rate": "60 qps max"},
         (2, 1, 8, False), (None, 31.5)),
        ({"tp": "2", "pp": "2", "concurrency_or_rate": "0.5 req/s"}, (2, 2, 1, False), (None, 0.5)),
    ],
)  # fmt: skip
def test_sizes_and_loads(
    fields: dict[str, str], layout: tuple[object, ...], load: tuple[float | None, float | None]
) -> None:
    found = row_fields.sizes(fields)
    assert (found.tensor, found.pipeline, found.data, found.experts > 1) == layout
    assert row_fields.load(fields) == load


def test_a_row_without_any_size_names_no_layout(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tensor-parallel size"):
        row_fields.sizes({"tp": "", "n_gpus": "8"})
    _write(tmp_path / "rows.csv", [{"engine": "vllm", "dp": 8}, {"engine": "vllm"}])
    assert [one.names_layout for one in read_rows(tmp_path / "rows.csv")[1]] == [True, False]


@pytest.mark.parametrize(
    ("name", "model", "precision", "label"),
    [
        ("Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B", "", "bf16"),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", "meta-llama/Llama-3.3-70B-Instruct", "FP8 (dynamic)", "fp8"),
        ("amd/Llama-3.3-70B-Instruct-FP8-KV", "meta-llama/Llama-3.3-70B-Instruct", "", "fp8"),
        ("Qwen/Qwen3-32B-AWQ", "Qwen/Qwen3-32B", "W4A16 (AWQ)", "int4"),
        ("x/Meta-Llama-3.1-8B-Instruct-quantized.w8a8", "meta-llama/Llama-3.1-8B", "w8a8", "int8"),
        ("Llama-2-70B (MLPerf)", "meta-llama/Llama-2-70b-hf", "nvfp4", "nvfp4"),
        ("gpt-oss-120b", "openai/gpt-oss-120b", "native", "mxfp4"),
    ],
)
def test_models_of_rows(name: str, model: str, precision: str, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names without an organization, and those of quantized copies, mean a model that is known."""
    monkeypatch.setattr(catalog, "_download", lambda *asked: pytest.fail("the hub was asked"))
    found = row_fields.published_model(name)
    assert found.spec.layers == find_model(model).spec.layers
    assert row_fields.read_label(found, precision) == label


def test_a_row_says_how_its_requests_come() -> None:
    assert row_fields.num_rounds({"notes": "only 200 prompts: a ramp"}, 64.0) == 200 / 64
    assert row_fields.num_rounds({"notes": "random lengths, prompts=10xC"}, 64.0) == 10
    assert row_fields.num_rounds({}, 64.0) is None
    assert not row_fields.has_equal_lengths({"notes": "150 requests, +-15% lengths"})
    assert row_fields.has_equal_lengths({"notes": "trtllm-bench"})


def test_limits_of_an_offline_benchmark() -> None:
    """trtllm-bench takes DeepSeek's latent cache for one with all heads, and runs fewer requests than fit."""
    model, cluster = find_model("deepseek-ai/DeepSeek-R1"), parse_cluster("4xB200", known_gpus())
    layout = Layout("trtllm", 1, data=4, whole_experts=True, weights="nvfp4", kv="fp8")
    requests, tokens = bench_limits(model, layout, cluster, 1024, 8192)
    assert (requests, tokens) == (96, 2048)
    assert bench_limits(model, layout, cluster, 8192, 1024)[1] == 8192 + 96, "prompts are not cut"
    assert bench_limits(model, replace(layout, weights="mxfp4"), cluster, 1024, 1024) == (2048, 8192)


def test_gpus_that_only_compute_prompts() -> None:
    """A size among which the heads cannot be divided is that of several groups."""
    model = find_model("deepseek-ai/DeepSeek-R1")
    found = decoding_part(Layout("trtllm", 36), model)
    assert (found.tensor, found.data, found.whole_experts) == (1, 32, True)
    assert decoding_part(Layout("trtllm", 8), model) == Layout("trtllm", 8)


def test_a_table_of_start_up_logs(tmp_path: Path) -> None:
    rows = tmp_path / "logs.csv"
    rows.write_text(
        "model,weights_precision,gpu,tp,util,max_model_len,kv_gib_per_gpu,kv_tokens\n"
        "meta-llama/Llama-3.1-8B-Instruct,bf16,H100-80GB-SXM,1,0.9,16000,51.38,\n"
        "neuralmagic/Meta-Llama-3.1-70B-Instruct-FP8,fp8,H100-80GB,2,not stated,not stated,31.323,205280\n"
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506,bf16,H100-80GB-SXM,1,0.95,16000,28.2,184832\n"
        "google/gemma-4-31b-it,bf16,H200,1,,,64.68,626949\n"
        "no/model,bf16,H999,1,,,1,\n"
    )
    summary = summarize_memory(*validate_memory(rows, known_gpus()))
    assert summary["kv_memory"]["n"] == 2
    assert summary["kv_memory"]["missed"] == 1
    assert summary["by"][0]["kv_memory"] < 0.001
    assert summary["kv_tokens"]["n"] == 3
    assert summary["kv_tokens"]["p90_ape"] < 0.002
    assert "2 rows, 1 missed" in format_memory(summary)
