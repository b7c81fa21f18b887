"""Flags, rows and result keys against a recording of vLLM's benchmark (scripts/record_vllm_bench.py)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from shardline.cli.flags import Parser, _Refuse
from shardline.cli.main import build_parser, main
from tests.benchmark.stub_server import Script, stream, stub_server, whole

RECORDED = json.loads((Path(__file__).parent / "vllm_bench.json").read_text())

OTHER_DEFAULTS = {
    ("throughput", "--input-len"): "vLLM's default workload is a download",
    ("throughput", "--output-len"): "vLLM's default workload is a download",
}


def actions_of(*commands: str) -> dict[str, argparse.Action]:
    parser = build_parser()
    for name in ("bench", *commands):
        [kinds] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        parser = kinds.choices[name]
    assert isinstance(parser, Parser)
    parser.complete()
    return dict(parser._option_string_actions)


@pytest.mark.parametrize("command", ["serve", "throughput", "latency", "startup", "sweep serve"])
def test_every_flag_of_vllm_is_known_and_has_its_default(command: str) -> None:
    recorded: dict[str, Any] = RECORDED["flags"][command]
    ours = actions_of(*command.split())
    assert len(recorded) >= 4
    for flag, facts in recorded.items():
        assert flag in ours, f"{flag} of vLLM is unknown"
        action = ours[flag]
        if isinstance(action, _Refuse) or (command, flag) in OTHER_DEFAULTS:
            continue
        default = "bench--" if flag == "--request-id-prefix" else action.default  # without its random part
        default = "inf" if default == float("inf") else default
        assert default == facts["default"] or (default in (None, False) and facts["default"] in (None, False)), flag
        if facts["choices"] is not None:
            assert action.choices is not None, flag
            assert {str(choice) for choice in action.choices} <= {*facts["choices"]}, flag
        assert action.required == facts["required"], flag


RUNS = {
    "--max-concurrency 4": "ttft tpot itl",
    "--request-rate 200 --goodput ttft:1000": "ttft tpot itl",
    "--percentile-metrics ttft,e2el,client_queue_time --max-concurrency 2": "ttft e2el client_queue_time",
    "--backend openai-embeddings": "e2el",
}
OPTIONAL_ROWS = {
    "Maximum request concurrency:": "--max-concurrency",
    "Request rate configured (RPS):": "--request-rate",
    "Request goodput (req/s):": "--goodput",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", RUNS)
def test_rows_and_keys_are_those_of_vllm(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pooling = "embeddings" in words
    answer: Script = [(0.0, whole({"data": [], "usage": {"prompt_tokens": 4}}))] if pooling else stream(8, 0.001, 0.001)
    with stub_server(lambda index, path, body: answer) as server:
        base = f"bench serve --base-url {server.url} --model demo --num-prompts 8 --random-input-len 16"
        base += " --random-output-len 8 --disable-tqdm --save-detailed --save-result"
        base += f" --result-dir {tmp_path} --result-filename r.json"
        assert main([*base.split(), *words.split()]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    wanted = {*RECORDED["keys"]["file"], *RECORDED["keys"]["pooling" if pooling else "generation"]}
    wanted |= {f"{kind}_{name}_ms" for name in RUNS[words].split() for kind in ("mean", "median", "std", "p99")}
    assert {key for key in wanted - set(result) if not key.startswith("ramp_up")} == set()

    lines = capsys.readouterr().out.splitlines()
    lines = lines[: next(index for index, line in enumerate(lines) if "From the Intended Send Time" in line)]
    assert lines[0] == " Serving Benchmark Result ".center(50, "=")
    first_title = next(index for index, line in enumerate(lines) if line.startswith("--"))
    labels = [line[:40].rstrip() for line in lines[1:first_title]]
    rows = RECORDED["rows"][RECORDED["rows"].index("Successful requests:") :]
    places = [rows.index(label) for label in labels]
    if not pooling:  # vLLM prints the throughput of inputs only then, and in between
        assert places == sorted(places)
    assert {row for row, flag in OPTIONAL_ROWS.items() if flag in words} == set(labels) & set(OPTIONAL_ROWS)
    expected = []
    for name in RUNS[words].split():
        short, title = RECORDED["metric_titles"][name]
        expected += [title.center(50, "-"), *(f"{kind} {short} (ms):" for kind in ("Mean", "Median", "P99"))]
    assert [line if line.startswith("-") else line[:40].rstrip() for line in lines[first_title:]] == expected
