"""Clients for JavaScript: node runs `node/*.test.js` against the servers of this suite."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.serving import Server

NODE = Path(__file__).parent / "node"


@pytest.mark.parametrize("client", ["openai", "ai_sdk"])
def test_node(client: str, server: Server, pooling_server: Server) -> None:
    urls = {"SHARDLINE_URL": f"{server.url}/v1", "SHARDLINE_POOLING_URL": f"{pooling_server.url}/v1"}
    command = ["node", "--test", "--test-reporter=spec", f"{client}.test.js"]
    done = subprocess.run(command, cwd=NODE, env={**os.environ, **urls}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pass 0" not in done.stdout
