"""`vllm bench serve` loads the server. `make clients-vllm` runs this, and installs vLLM where there is none."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import demo_folder
from tests.e2e.serving import Server

BACKENDS = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_request_succeeds(backend: str, server: Server, tmp_path: Path) -> None:
    options = {
        "--backend": backend,
        "--base-url": server.url,
        "--endpoint": BACKENDS[backend],
        "--model": "demo",
        "--tokenizer": demo_folder(),
        "--dataset-name": "random",
        "--random-input-len": "32",
        "--random-output-len": "8",
        "--num-prompts": "6",
        "--result-filename": "result.json",
        "--result-dir": str(tmp_path),
    }
    command = [os.environ.get("VLLM", "vllm"), "bench", "serve", "--save-result", "--ignore-eos"]
    command += [word for option in options.items() for word in option]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 6
    assert result["total_output_tokens"] == 48
