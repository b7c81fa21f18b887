"""schemathesis sends what /openapi.json allows and what it forbids, and checks the answers against it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import serve_demo

OPTIONS = {
    # A schema cannot say everything that a request needs, such as the name of a served model.
    "--exclude-checks": "positive_data_acceptance",
    "--seed": "1",
    "--request-timeout": "30",
    "--suppress-health-check": "all",
    "--generation-database": "none",
}
GENERATING = "/(v1/(completions|chat|responses|embeddings|messages)|inference)"


@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_answers_fit_their_schemas(runner: str, tmp_path: Path) -> None:
    runs = [{"--phases": "fuzzing", "--max-examples": "40", "--include-path": "/v1/embeddings"}]
    if runner == "generate":
        # The coverage of the endpoints with a hundred fields takes thousands of requests.
        runs = [{"--phases": "fuzzing", "--max-examples": "40"}]
        runs += [{"--phases": "coverage", "--exclude-path-regex": GENERATING}]
    with serve_demo("--max-model-len", "256", "--runner", runner) as server:
        for run in runs:
            options = [word for option in {**OPTIONS, **run}.items() for word in option]
            command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *options]
            done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
            assert done.returncode == 0, done.stdout + done.stderr + server.output[-5000:]
            assert server.process.poll() is None, server.output[-5000:]
