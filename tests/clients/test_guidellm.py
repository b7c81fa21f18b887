"""guidellm loads the server with chats and with completions, and none of its requests fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import SHARDLINE_PYTHON, demo_folder
from tests.e2e.serving import Server

PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_request_succeeds(path: str, server: Server, tmp_path: Path) -> None:
    packages = subprocess.run([SHARDLINE_PYTHON, "-c", PACKAGES], capture_output=True, text=True, check=True).stdout
    options = {
        "--backend": f"kind=openai_http,target={server.url},request_format={path}",
        "--profile": "kind=concurrent,streams=2",
        "--constraint": "kind=max_requests,count=6",
        "--tokenizer": f"kind=huggingface_auto,model={demo_folder()}",
        "--data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--output": f"kind=json,path={tmp_path}/report.json",
    }
    command = [sys.executable, "-m", "tests.clients.run_guidellm", "run", "--disable-console"]
    command += [word for option in options.items() for word in option]
    env = {**os.environ, "TORCH_PACKAGES": packages.strip()}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    assert metrics["output_token_count"]["successful"]["min"] == 8
    assert metrics["time_to_first_token_ms"]["successful"]["min"] > 0
