"""The commands of files in deploy/, run on two hosts: the demo model, CPUs and one rank per host instead of eight."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.deploy_files import leader_worker_set, systemd_unit
from tests.faults.hosts import TOKEN, Hosts, await_ready
from tests.faults.site import SMALL
from tests.forks import ForkServer

KEY = "a-key-of-these-tests-only"


def scaled_down(words: list[str]) -> list[str]:
    """The command with a smaller model and fewer ranks."""
    small = {"Qwen/Qwen3-32B": "demo", "--tensor-parallel-size=8": "--tensor-parallel-size=1"}
    found = [small.get(word, word) for word in words]
    if "-tp" in found:
        found[found.index("-tp") + 1] = "1"
    assert "demo" in found
    return [*found, *SMALL[1:]]


@pytest.mark.parametrize("file", ["leaderworkerset.yaml", "shardline.service"])
def test_two_hosts_serve(file: str, tmp_path: Path, fork_server: ForkServer) -> None:
    (tmp_path / "join-token").write_text(TOKEN)
    with contextlib.closing(Hosts(2, forks=fork_server)) as hosts:
        address = hosts.address(0)
        if file == "leaderworkerset.yaml":
            commands = leader_worker_set(address)
            tokens = [TOKEN, TOKEN]
        else:
            commands = [systemd_unit(address, rank, str(tmp_path)) for rank in range(2)]
            tokens = [f"not-the-credential-of-the-unit-{rank}" for rank in range(2)]
        logs = [tmp_path / f"host{rank}.log" for rank in range(2)]
        nodes = [
            hosts.start(
                rank,
                *scaled_down(commands[rank]),
                log=logs[rank],
                SHARDLINE_JOIN_TOKEN=tokens[rank],
                SHARDLINE_API_KEY=KEY,
            )
            for rank in range(2)
        ]
        try:
            await_ready(address, 60.0, *nodes)
        except AssertionError:
            pytest.fail("\n".join(log.read_text() for log in logs))
        with httpx.Client(base_url=f"http://{address}:8000", headers={"Authorization": f"Bearer {KEY}"}) as client:
            assert client.get("/live").status_code == 200
            request = {"prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
            answer = client.post("/v1/completions", json=request, timeout=30.0)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 8
        os.kill(nodes[0].pid, signal.SIGTERM)
        assert [node.wait(15) for node in nodes] == [0, 0]
