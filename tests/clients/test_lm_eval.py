"""lm_eval scores a local task through /v1/completions, as transformers scores it, and has chats answered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import SHARDLINE_PYTHON, demo_folder
from tests.e2e.serving import Server

TASKS = Path(__file__).parent / "tasks"


def reference_scores(requests: list[list[str]]) -> list[tuple[float, bool]]:
    command = [SHARDLINE_PYTHON, "-m", "tests.clients.reference_scores", demo_folder()]
    done = subprocess.run(command, input=json.dumps(requests), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [tuple(score) for score in json.loads(done.stdout)]


def evaluate(task: str, folder: Path, model: str, *options: str) -> list[dict[str, Any]]:
    """The samples of a task that lm_eval ran, in the order of the task's lines."""
    command = [sys.executable, "-m", "lm_eval", "--model", model, "--tasks", task, "--include_path", str(TASKS)]
    command += ["--log_samples", "--output_path", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [path] = folder.rglob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_scores_are_those_of_transformers(server: Server, tmp_path: Path) -> None:
    arguments = f"base_url={server.url}/v1/completions,model=demo"
    samples = evaluate("pydoc", tmp_path, "local-completions", "--model_args", arguments)
    requests, scores = [], []
    for sample in samples:
        for request, [answer] in zip(sample["arguments"].values(), sample["resps"], strict=True):
            requests.append([request["arg_0"], request["arg_1"]])
            scores.append((float(answer[0]), answer[1] in (True, "True")))
    assert len(scores) == 10
    for ours, reference in zip(scores, reference_scores(requests), strict=True):
        assert ours[0] == pytest.approx(reference[0], abs=1e-3)
        assert ours[1] == reference[1]


def test_chats_are_answered(server: Server, tmp_path: Path) -> None:
    arguments = f"base_url={server.url}/v1/chat/completions,model=demo,num_concurrent=2"
    options = ["--model_args", arguments, "--apply_chat_template"]
    samples = evaluate("pydoc_chat", tmp_path, "local-chat-completions", *options)
    assert len(samples) == 4
    client = server.client()
    for sample in samples:
        [[answer]] = sample["resps"]
        messages = json.loads(sample["arguments"]["gen_args_0"]["arg_0"][0])
        asked = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=64)
        assert answer == asked.choices[0].message.content
    assert any(sample["exact_match"] == 1 for sample in samples)
