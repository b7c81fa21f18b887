"""lm_eval scores a local task through /v1/completions, as transformers scores it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import SHARDLINE_PYTHON
from tests.e2e.serving import Server

TASKS = Path(__file__).parent / "tasks"
FOLDER = "import shardline.checkpoints.hub as hub; print(hub.resolve_tokenizer('demo'))"


def reference_scores(requests: list[list[str]]) -> list[tuple[float, bool]]:
    folder = subprocess.run([SHARDLINE_PYTHON, "-c", FOLDER], capture_output=True, text=True, check=True).stdout.strip()
    command = [SHARDLINE_PYTHON, "-m", "tests.clients.reference_scores", folder]
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [tuple(score) for score in json.loads(done.stdout)]


def test_scores_are_those_of_transformers(server: Server, tmp_path: Path) -> None:
    arguments = f"base_url={server.url}/v1/completions,model=demo"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", "pydoc", "--include_path", str(TASKS), "--log_samples", "--output_path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.rglob("samples_pydoc_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    requests, scores = [], []
    for sample in samples:
        for request, [answer] in zip(sample["arguments"].values(), sample["resps"], strict=True):
            requests.append([request["arg_0"], request["arg_1"]])
            scores.append((float(answer[0]), answer[1] in (True, "True")))
    assert len(scores) == 10
    for ours, reference in zip(scores, reference_scores(requests), strict=True):
        assert ours[0] == pytest.approx(reference[0], abs=1e-3)
        assert ours[1] == reference[1]
