"""Batches of real processes that are killed: they go on where they stopped, and nothing is answered twice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.serving import serve
from tests.forks import ForkServer

pytestmark = pytest.mark.slow

COUNT = 60
BODY = {"prompt": "a", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
IDS = [f"r{index}" for index in range(COUNT)]


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": BODY} for name in IDS]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def check(answers: str, before: str) -> None:
    """Each request is answered once, in order, and what was answered before the kill is as it was."""
    assert answers.startswith(before[: before.rfind("\n") + 1])
    found = [json.loads(line) for line in answers.splitlines()]
    assert [answer["custom_id"] for answer in found] == IDS
    assert len({answer["response"]["body"]["choices"][0]["text"] for answer in found}) == 1


def test_of_a_server(requests: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    flags = ["demo", "--max-model-len", "128", "--max-num-seqs", "4", "--batch-dir", str(tmp_path / "batches")]
    with serve(*flags, forks=fork_server) as server, server.client() as client:
        file = client.files.create(file=requests, purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")

        def completed() -> int:
            counts = client.batches.retrieve(batch.id).request_counts
            return 0 if counts is None else counts.completed

        server.wait_until(lambda: completed() > 3, "the first answers", 60)
        server.process.kill()
        server.process.wait()
    [output] = (tmp_path / "batches" / "files").glob("*-output")
    before = output.read_text()
    assert 0 < before.count("\n") < COUNT
    with serve(*flags, forks=fork_server) as server, server.client() as client:
        server.wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", "the end", 120)
        ended = client.batches.retrieve(batch.id)
        assert ended.request_counts is not None
        assert (ended.request_counts.completed, ended.request_counts.failed) == (COUNT, 0)
        assert ended.output_file_id is not None
        check(client.files.content(ended.output_file_id).text, before)


def test_of_run_batch(requests: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    flags = ["--model", "demo", "--max-model-len", "128", "--max-num-seqs", "4"]
    command = [sys.executable, "-m", "shardline", "run-batch", "-i", str(requests), "-o", str(output), *flags]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not (output.exists() and output.read_text().count("\n") > 3):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
    before = output.read_text()
    assert 0 < before.count("\n") < COUNT
    output.write_text(before + '{"id":"batch_req_half a li')
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    assert "requests are answered already" in again.stderr
    check(output.read_text(), before)
