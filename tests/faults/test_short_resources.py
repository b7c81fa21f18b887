"""A server that is short of descriptors: clients take all that they may have, and replicas start again all the same."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.processes import assert_all_end, command_line
from tests.faults.test_dying_processes import children_of


def test_a_replica_starts_again_while_clients_hold_all_descriptors_that_they_may_have(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = f"ulimit -n 64; exec {sys.executable} -m shardline serve -dp 2 --port 0"
    with log.open("wb") as file:
        process = subprocess.Popen(["bash", "-c", command], stderr=file)
    engines: list[int] = []
    try:
        port = int(await_line(process, log, r"serving .* at http://127.0.0.1:(\d+)"))
        engines = [pid for pid in children_of(process.pid) if "engine" in command_line(pid)]
        with contextlib.ExitStack() as idle:
            for _ in range(120):
                idle.enter_context(socket.create_connection(("127.0.0.1", port)))
            await_line(process, log, "(refused)")
            for pid in engines:
                os.kill(pid, signal.SIGKILL)
            for index in range(2):
                await_line(process, log, f"(replica {index} runs again)")
        assert "could not start again" not in log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        engines += children_of(process.pid)
        process.terminate()
        process.wait(20)
    assert_all_end(engines, within=5)


def await_line(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    """The first group of the pattern in the log."""
    deadline = time.monotonic() + 60
    while not (found := re.search(pattern, log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return found[1]
