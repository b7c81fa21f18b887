"""Real engine processes for tests that kill or stop them."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import time
from pathlib import Path

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.engine.client import EngineClient
from shardline.engine.start import start_engine
from shardline.messages.engine import EngineFailed, EngineOutputs
from shardline.messages.request import Request
from shardline.sampling_params import SamplingParams


class Replica:
    """An engine, with two ranks unless options say otherwise, and what it told its front."""

    def __init__(self, step_timeout: float, model: str = "demo", **options: object) -> None:
        self.messages: queue.Queue[EngineOutputs | EngineFailed] = queue.Queue()
        options = {"model": model, "step_timeout": step_timeout, **(options or {"tensor_parallel_size": 2})}
        config = EngineConfig.from_options(**options)
        self.client = EngineClient(resolve_here(config), 0, self.messages.put, start_engine, b"")
        report = "\n".join(self.client.wait_ready(60).report)
        self.worker_pids = [int(pid) for pid in re.findall(r"pid (\d+)", report)]
        assert self.client._child is not None
        self.engine_pid = self.client._child.pid

    def start_long_request(self, max_tokens: int = 1500) -> None:
        """Returns once its tokens flow."""
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.client.add([Request(request_id="long", prompt_token_ids=list(range(100, 120)), sampling=sampling)])
        assert isinstance(self.messages.get(timeout=30), EngineOutputs)

    def failure(self, timeout: float) -> str:
        """The message of the failure that must come within `timeout` seconds."""
        return self.await_failure(timeout).message

    def await_failure(self, timeout: float) -> EngineFailed:
        """The failure that must come within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            message = self.messages.get(timeout=max(0.01, deadline - time.monotonic()))
            if isinstance(message, EngineFailed):
                return message


def clean_up(replica: Replica) -> None:
    for pid in (replica.engine_pid, *replica.worker_pids):
        if alive(pid):
            os.kill(pid, signal.SIGCONT)
    replica.client.close()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_all_end(pids: list[int], within: float) -> None:
    deadline = time.monotonic() + within
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.02)


def start_time(pid: int) -> int:
    """When a process began, in ticks since the host's start; 0: it has ended."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def command_line(pid: int) -> str:
    """The words of a process, or its title; empty: it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""
