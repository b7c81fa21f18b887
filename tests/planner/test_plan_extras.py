"""`plan --compare`, `--html` and `--calibrate`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardline.cli.main import main

LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"
WORDS = ["plan", LLAMA_70B, "--gpus", "4xH100", "--link", "pcie", "--quantization", "none", "--kv-cache-dtype", "auto"]


@pytest.mark.slow
def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--running", "16", "--compare", "tp4", "pp4"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"bf16 tp4 +bf16 pp4\n", text)
    for line in (
        "weights a GPU, GiB",
        "KV cache a GPU, GiB",
        "TTFT, s",
        "output tokens/s",
        "received in a decode step",
    ):
        assert re.search(rf"^{re.escape(line)} +\S", text, re.MULTILINE)
    assert re.search(r"^TPOT: bf16 tp4 is better (from 1 to|up to) \d+ requests", text, re.MULTILINE)
    assert re.search(r"^tokens/s: bf16 pp4 is better up to \d+ GB/s of the link, bf16 tp4 above$", text, re.MULTILINE)
    assert main([*WORDS, "--compare", "tp4", "tp1"]) == 0
    assert "no: bf16 tp1: " in capsys.readouterr().out
    assert main([*WORDS, "--compare", "tp4", "xp4"]) == 2
    assert "'xp4' is no part of a layout" in capsys.readouterr().err
    assert main([*WORDS, "--compare", "tp4", "tp4-kv:zz"]) == 2
    assert "'kv:zz' is no part of a layout" in capsys.readouterr().err
    assert main([*WORDS, "--compare", "tp4", "tp16"]) == 2
    assert "--compare 'tp16': it needs 16 GPUs, and 4xH100-80GB-PCIe has 4" in capsys.readouterr().err
    assert main([*WORDS, "--compare", "tp4", "tp2-cp2"]) == 0, "context parallelism is priced too"
    assert "no: bf16 tp2 cp2: context_parallel_size 2 works on CPUs only so far" in capsys.readouterr().out
    assert main([*WORDS, "--rate", "1", "--compare", "tp4", "pp4"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"tokens/s: bf16 pp4 is better up to \d+ GB/s of the link, both are equal above", text)


def test_json_has_the_comparison_and_html_is_written_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    assert main([*WORDS, "--json", "--compare", "tp4", "pp4", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)["comparison"]
    assert [(one["tp"], one["pp"]) for one in found["layouts"]] == [(4, 1), (1, 4)]
    assert len(found["swaps"]) == 4
    assert "exchanges in a step" in page.read_text(encoding="utf-8")


def test_html_is_one_file_without_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    words = [*WORDS, "--simulate", "--num-prompts", "20", "--rate", "4", "--html", str(page)]
    assert main(words) == 0
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)=|https?://", text)
    drawings = [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", text)]
    assert len(drawings) == 4, "frontier, memory, cost over load, KV cache over time"
    assert all(len(one) > 8 for one in drawings)
    assert "$ shardline serve" in text
    capsys.readouterr()
    assert main([*words[:-1], str(tmp_path / "no" / "plan.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*WORDS, "-tp", "4", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return dict(found["layouts"][found["recommended"]])


@pytest.mark.slow
def test_a_benchmark_calibrates_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = tmp_path / "bench.json"
    load = {"completed": 200, "max_concurrency": 16, "total_input_tokens": 200 * 1024, "total_output_tokens": 200 * 128}
    before = plan(capsys, "--running", "16")
    tpot = 1.2 * before["tpot_ms"]["p50"]  # type: ignore[index]
    bench.write_text(json.dumps({**load, "median_tpot_ms": tpot, "median_ttft_ms": 700.0}))
    after = plan(capsys, "--running", "16", "--calibrate", str(bench))
    assert after["tpot_ms"]["p50"] == pytest.approx(tpot, rel=0.01)  # type: ignore[index]
    assert after["ttft_ms"]["p50"] == pytest.approx(700, rel=0.05)  # type: ignore[index]
    width = [one["tpot_ms"]["p90"] / one["tpot_ms"]["p10"] for one in (before, after)]  # type: ignore[index]
    assert width[1] < width[0]
    other, calibrated = plan(capsys, "--running", "4"), plan(capsys, "--running", "4", "--calibrate", str(bench))
    # Most of the measured 20% is taken for a slower link, whose share of a step is smaller with fewer requests.
    assert 1.05 < calibrated["tpot_ms"]["p50"] / other["tpot_ms"]["p50"] < 1.3  # type: ignore[index]
    own = {
        "num_prompts": 16,
        "prompt_tokens": 16384,
        "generation_tokens": 2048,
        "ttft": {"50": 0.3},
        "tpot": {"50": 0.05},
    }
    bench.write_text(json.dumps([own]))
    assert plan(capsys, "--running", "16", "--calibrate", str(bench))["tpot_ms"]["p50"] == pytest.approx(50, rel=0.01)  # type: ignore[index]
    words = [*WORDS[:5], "pcie", "-tp", "4", "--running", "16", "--calibrate", str(bench), "--json"]
    assert main(words) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    plain = next(one for one in layouts if one["weights"] == "bf16" and one["kv"] == "auto")
    assert plain["tpot_ms"]["p50"] == pytest.approx(50, rel=0.01), "measured was what serve starts with these flags"
    assert main([*words[:6], *words[8:]]) == 2
    assert "--calibrate needs flags that name the layout that was measured" in capsys.readouterr().err
    bench.write_text('{"median_tpot_ms": 5}')
    assert main([*WORDS, "--calibrate", str(bench)]) == 2
    assert "no result of a benchmark: 'num_prompts' is missing" in capsys.readouterr().err


@pytest.mark.parametrize("factor", [0.1, 8.0])
def test_calibration_reaches_a_machine_that_is_far_from_the_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float
) -> None:
    bench = tmp_path / "bench.json"
    measured = []
    for running in (1, 4):
        before = plan(capsys, "--running", str(running))
        times = {
            f"median_{name}_ms": factor * before[f"{name}_ms"]["p50"]  # type: ignore[index]
            for name in ("ttft", "tpot")
        }
        measured.append({"completed": 4, "max_concurrency": running, **times})
        measured[-1] |= {"total_input_tokens": 4 * 1024, "total_output_tokens": 4 * 128}
    bench.write_text(json.dumps(measured))
    for one in measured:
        after = plan(capsys, "--running", str(one["max_concurrency"]), "--calibrate", str(bench))
        assert after["tpot_ms"]["p50"] == pytest.approx(one["median_tpot_ms"], rel=0.1)  # type: ignore[index]


def test_a_start_up_log_calibrates_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    log.write_text("INFO Available KV cache memory: 30.25 GiB\nINFO GPU KV cache size: 396,400 tokens\n")
    found = plan(capsys, "--calibrate", str(log))
    assert found["kv_bytes"] == pytest.approx(30.25 * 2**30, rel=0.001)
    log.write_text("INFO GPU KV cache size: 300,000 tokens\n")
    assert plan(capsys, "--calibrate", str(log))["kv_tokens"] == pytest.approx(300_000, rel=0.001)
    log.write_text("INFO Available KV cache memory: 300 GiB\n")
    assert main([*WORDS, "-tp", "4", "--calibrate", str(log)]) == 2
    assert "a KV cache of 300.0 GiB is larger than the memory of a GPU" in capsys.readouterr().err
    log.write_text("nothing of use")
    assert main([*WORDS, "--calibrate", str(log)]) == 2
    assert "the log has no line" in capsys.readouterr().err


def test_the_command_names_the_only_cache_type_of_compressed_entries(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "deepseek-ai/DeepSeek-V4-Flash", "--gpus", "4xB200", "-tp", "4"]) == 0
    told = " ".join(capsys.readouterr().out.replace("\\\n", "").split())
    assert "vLLM only: " in told
    assert "--tensor-parallel-size 4 --max-model-len 8192 --kv-cache-dtype fp8" in told
    assert main(["plan", "deepseek-ai/DeepSeek-V4-Flash", "--gpus", "16xH100", "-tp", "16"]) == 2
    assert "cannot share 8 groups of outputs among 16 ranks" in capsys.readouterr().err
    assert main(["plan", "deepseek-ai/DeepSeek-V4-Flash", "--gpus", "4x8xL4", "-pp", "32"]) == 0, (
        "stages of windows only"
    )
