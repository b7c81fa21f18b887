"""The cases of perf/nodes.py that start servers: over two hosts, which are network namespaces, and on one."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import httpx

from shardline.api.engines import Client, EngineEvent
from shardline.api.replicas import Replicas
from shardline.config.engine import EngineConfig
from shardline.deployment.fingerprint import NumericContract
from shardline.messages.engine import EngineOutputs, EngineReady
from shardline.messages.request import Request, SequenceOutput
from shardline.messages.stats import EngineStats
from shardline.sampling_params import SamplingParams

HEAD = "10.219.0.1"
STARTS = 3
STREAMS = 16
NUM_TOKENS = 250
IDLE_S = 20.0
KEPT = 256
"""Choices that run at once while the front keeps their tokens."""


def start_server(name: str, *flags: str) -> subprocess.Popen[str]:
    """`shardline serve` in a namespace; its log comes over a pipe."""
    serve = [sys.executable, "-m", "shardline", "serve", "demo", "-pp", "2", "--device", "cpu", "--cpu-threads", "1"]
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *serve, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "SHARDLINE_JOIN_TOKEN": "a-token-of-this-benchmark-only"},
    )


def start_site(names: Sequence[str], *flags: str) -> list[subprocess.Popen[str]]:
    """A server with a node in each namespace, which is ready."""
    nodes = ("--nnodes", str(len(names)), "--master-addr", HEAD) if len(names) > 1 else ()
    servers = [start_server(name, *nodes, "--node-rank", str(rank), *flags) for rank, name in enumerate(names)]
    output = servers[0].stdout
    assert output is not None
    lines = []
    for line in output:
        lines.append(line)
        if "startup complete" in line:
            return servers
    end_site(servers)
    raise SystemExit("".join(lines))


def end_site(servers: Sequence[subprocess.Popen[str]]) -> None:
    """End all nodes of a server."""
    servers[0].terminate()
    for server in servers:
        server.communicate()


def time_start(names: Sequence[str]) -> float:
    """Seconds until a server with a node in each namespace is ready."""
    began = time.perf_counter()
    servers = start_site(names)
    seconds = time.perf_counter() - began
    end_site(servers)
    return seconds


def ready(names: Sequence[str]) -> str:
    """Starts over two hosts and on one take turns."""
    apart, together = [], []
    for _ in range(STARTS):
        apart.append(time_start(names))
        together.append(time_start(names[:1]))
    two, one = statistics.median(apart), statistics.median(together)
    return f"ready: {two:.2f} s over two hosts, {one:.2f} s on one; ratio {two / one:.2f}"


def pipeline(names: Sequence[str]) -> str:
    """Streams of a server over two hosts and of one on one host take turns; the client is on the first host."""
    sites = [start_site(names), start_site(names[:1], "--port", "8001")]
    try:
        client = ["ip", "netns", "exec", names[0], sys.executable, "-m", "perf.node_servers", "8000", "8001"]
        found = subprocess.run(client, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        for site in sites:
            end_site(site)
    apart, together = json.loads(found.stdout)
    return (
        f"pipeline: {apart:.3f} ms a token over two hosts, {together:.3f} ms on one; "
        f"plan, hand-off and result add {apart - together:.3f} ms"
    )


def time_streams(ports: Sequence[int]) -> list[float]:
    """The median milliseconds between the tokens of one stream, for servers that take turns."""
    intervals: list[list[float]] = [[] for _ in ports]
    request = {"model": "demo", "prompt": "Once upon", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    for _ in range(STREAMS):
        for port, measured in zip(ports, intervals, strict=True):
            times = []
            with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=request) as response:
                times = [time.perf_counter() for line in response.iter_lines() if line.startswith("data: {")]
            measured.append((times[-1] - times[20]) / (len(times) - 21))
    return [1e3 * statistics.median(measured) for measured in intervals]


def watch(names: Sequence[str]) -> str:
    """What an idle server of two ranks on one host takes of a core for its heartbeats, and the cost of kept tokens."""
    servers = start_site(names[:1])
    try:
        pids = subprocess.run(["ip", "netns", "pids", names[0]], stdout=subprocess.PIPE, text=True, check=True)
        time.sleep(3.0)  # the start is over
        before = [_cpu_seconds(pid) for pid in pids.stdout.split()]
        time.sleep(IDLE_S)
        share = sum(_cpu_seconds(pid) for pid in pids.stdout.split()) - sum(before)
    finally:
        end_site(servers)
    return (
        f"watch: heartbeats take {100 * share / IDLE_S:.2f}% of one core; "
        f"kept tokens take {time_kept_tokens():.3f} us a token in the front"
    )


def _cpu_seconds(pid: str) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = re.sub(r"\(.*\)", "name", file.read()).split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


class _NoEngine:
    """The client of an engine that takes all requests."""

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        return EngineReady(1024, 16, NumericContract("stub"), 25.0, [])

    def add(self, requests: Sequence[Request]) -> None:
        pass

    def abort(self, request_ids: Sequence[str]) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        pass

    def close(self, timeout: float = 10.0) -> None:
        pass


def time_kept_tokens() -> float:
    """Microseconds that the front takes to keep a token of a choice and to find the choice."""

    def connect(config: EngineConfig, index: int, on_event: Callable[[EngineEvent], None]) -> Client:
        return _NoEngine()

    replicas = Replicas(EngineConfig.from_options(model="demo"), lambda index, event: None, connect)
    sampling = SamplingParams(max_tokens=1000)
    requests = [
        Request(request_id=f"r{number}-0", prompt_token_ids=[1, 2, 3], sampling=sampling) for number in range(KEPT)
    ]
    for request in requests:
        replicas.add_requests([request])
    outputs = EngineOutputs([SequenceOutput(one.request_id, [5]) for one in requests], EngineStats())
    rounds = []
    for _ in range(200):
        began = time.perf_counter()
        replicas.handle_event(0, outputs)
        rounds.append(time.perf_counter() - began)
    return 1e6 * statistics.median(rounds) / KEPT


SERVER_CASES = {"ready": ready, "pipeline": pipeline, "watch": watch}

if __name__ == "__main__":
    print(json.dumps(time_streams([int(port) for port in sys.argv[1:]])))
