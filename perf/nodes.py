"""What it costs that ranks are on two hosts: `python -m perf.nodes [CASE ...]`, as root.

Two network namespaces with a veth pair between them play two hosts. Both ends of an exchange spin, so they need a core
each. Alternatives take turns, and the medians of their blocks are printed. Cases:

gather   a gather of two ranks in two namespaces / a bare spinning exchange of the same bytes over the same pair
plan     one way of a step's plan from an engine to a rank on another host, and of the result
step     a decode step of the demo model at TP=2 over sockets / over shared memory
ready    from the command to a server of two ranks that is ready: one on each of two hosts / both on one host
pipeline milliseconds a token of a stream at PP=2, from a server over two hosts / from one on one host
watch    what heartbeats and kept tokens cost a server on one host
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import queue
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from perf.node_servers import SERVER_CASES

from shardline import _cpu
from shardline.channel import Channel
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment
from shardline.deployment.here import resolve_here
from shardline.deployment.kv_budget import fixed_allocation
from shardline.deployment.segment import segment_layout
from shardline.engine.engine import Engine
from shardline.engine.executor.base import Executor
from shardline.messages.control import Control, Probe
from shardline.messages.request import Request
from shardline.messages.step import RankStep, SequenceResult, SequenceStep, StepPlan, StepResult, rank_steps
from shardline.messages.worker import (
    RankReport,
    RunStep,
    StepDone,
    StepReply,
    StepRequest,
)
from shardline.runtime.machines import open_backend
from shardline.runtime.parallel.exchange import SocketGroup
from shardline.runtime.parallel.groups import connect_host_memory
from shardline.runtime.parallel.rendezvous import Arrivals, Meeting, connect_ranks, connect_to_engine, steps_of
from shardline.runtime.worker import Worker
from shardline.runtime.worker_process import read_line
from shardline.sampling_params import SamplingParams
from shardline.segment.expert_load import Counts

SIZES = (2 << 10, 16 << 10, 128 << 10, 1 << 20, 8 << 20)
"""Bytes that each rank brings to a gather."""
BLOCKS = 41
PATIENCE_S = 20.0
PLANS, PLAN_SEQUENCES, PLAN_INTERVAL_S = 1000, 16, 0.002
PROMPT_LEN = 64
NUM_TOKENS = 100
ADDRESSES = ("10.219.0.1", "10.219.0.2")

BARE_EXCHANGE = r"""
#include <errno.h>
#include <sys/socket.h>
int exchange(int fd, const char* from, char* to, long num_bytes, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    long sent = 0, received = 0;
    while (sent < num_bytes || received < num_bytes) {
      if (sent < num_bytes) {
        long n = send(fd, from + sent, num_bytes - sent, MSG_DONTWAIT);
        if (n > 0) sent += n; else if (errno != EAGAIN) return -1;
      }
      if (received < num_bytes) {
        long n = recv(fd, to + received, num_bytes - received, MSG_DONTWAIT);
        if (n > 0) received += n; else if (n == 0 || errno != EAGAIN) return -1;
      }
    }
  }
  return 0;
}
"""


class FolderStore:
    """Values in files: namespaces of one computer see the same folders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: bytes) -> None:
        path = self._folder / key.replace("/", "-")
        path.with_suffix(".new").write_bytes(value)
        path.with_suffix(".new").rename(path)

    def get(self, key: str, timeout_s: float) -> bytes:
        path, deadline = self._folder / key.replace("/", "-"), time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody has set {key}")
            time.sleep(0.005)
        return path.read_bytes()


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[str]]:
    """The names of two connected namespaces; they disappear at the end."""
    names = [f"shardline-{os.getpid()}-{end}" for end in "ab"]
    devices = [f"sl{os.getpid()}{end}" for end in "ab"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", devices[0], "netns", names[0], "type", "veth", "peer", devices[1], "netns", names[1])
        for name, device, address in zip(names, devices, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/30", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def run_ranks(case: str) -> list[list[object]]:
    """Run both ranks of a case, each in its namespace; returns the rows that rank 0 measured."""
    segment = os.memfd_create("segment")
    with two_namespaces() as names, tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank, name in enumerate(names):
            command = [sys.executable, "-m", "perf.nodes", case, "--rank", str(rank), "--folder", folder]
            command += ["--segment", str(segment)]
            output = subprocess.PIPE if rank == 0 else None
            namespace = ["ip", "netns", "exec", name]
            ranks.append(subprocess.Popen([*namespace, *command], pass_fds=[segment], stdout=output))
        measured, _ = ranks[0].communicate()
        if ranks[0].returncode or ranks[1].wait():
            raise SystemExit(f"{case}: a rank failed")
        rows: list[list[object]] = json.loads(measured)
        return rows


def medians(turns: Sequence[Callable[[], float]]) -> list[float]:
    """The median of each alternative's results; they take turns, and the first turn of each does not count."""
    results: list[list[float]] = [[] for _ in turns]
    for block in range(BLOCKS):
        for turn, measured in zip(turns, results, strict=True):
            seconds = turn()
            if block:
                measured.append(seconds)
    return [statistics.median(measured) for measured in results]


def load_bare_exchange(folder: Path, rank: int) -> Callable[..., int]:
    """The bare exchange, compiled."""
    source, library = folder / f"bare{rank}.c", folder / f"bare{rank}.so"
    source.write_text(BARE_EXCHANGE)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    exchange: Callable[..., int] = ctypes.CDLL(str(library)).exchange
    return exchange


def gather(rank: int, folder: Path, segment: int) -> list[list[object]]:
    """Rows of bytes, microseconds of a gather, and microseconds of a bare exchange."""
    bare = load_bare_exchange(folder, rank)
    meeting = Meeting(FolderStore(folder), ADDRESSES[rank], b"only for a benchmark", PATIENCE_S)
    sockets = connect_ranks(meeting, rank, {"group": (0, 1), "bare": (0, 1)})
    peer = sockets["bare"][1 - rank]
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setblocking(False)
    group = SocketGroup([sockets["group"][1 - rank].detach()] * 2, rank, ["rank 0", "rank 1"])
    rows: list[list[object]] = []
    for size in SIZES:
        rounds = max(2, min(200, (4 << 20) // size))
        local, out = torch.zeros(1, size // 2, dtype=torch.bfloat16), torch.empty(1, size, dtype=torch.bfloat16)
        program = _cpu.Program()
        program.begin()
        for _ in range(rounds):
            group.all_gather_columns(local, [size // 2] * 2, out, PATIENCE_S)
        program.set_output(out)
        program.end()

        def gathers(program: _cpu.Program = program, rounds: int = rounds) -> float:
            began = time.perf_counter()
            program.replay()
            return (time.perf_counter() - began) / rounds

        def exchanges(local: torch.Tensor = local, out: torch.Tensor = out, rounds: int = rounds) -> float:
            began = time.perf_counter()
            pointers = ctypes.c_void_p(local.data_ptr()), ctypes.c_void_p(out.data_ptr())
            assert bare(peer.fileno(), *pointers, ctypes.c_long(local.nbytes), rounds) == 0
            return (time.perf_counter() - began) / rounds

        rows.append([size, *(1e6 * seconds for seconds in medians([gathers, exchanges]))])
    return rows


class OneRank(Executor):
    """One rank in this process. The other rank's process plans the same steps by itself."""

    max_in_flight = 1

    def __init__(self, deployment: Deployment, rank: int, segment: memoryview, meeting: Meeting) -> None:
        self._deployment = deployment
        self._rank = rank
        place = deployment.placements[0][rank]
        backend = open_backend("cpu", rank, place.threads)
        layout = segment_layout(deployment, 0, place.host)
        self.groups = connect_host_memory(backend.kernels, segment, layout, rank, PATIENCE_S, meeting)
        self._worker = Worker(deployment, backend, self.groups)
        self._results: list[StepResult] = []

    def start(self) -> list[RankReport]:
        allocation = fixed_allocation(self._deployment)
        assert allocation is not None
        self.allocation = allocation
        return [self._worker.load()]

    def submit_step(self, plans: Sequence[StepPlan]) -> None:
        (step,) = rank_steps(plans)
        result = self._worker.runner.run_step(step)
        assert result is not None
        self._results.append(result)

    def collect_results(self) -> list[StepResult]:
        return [self._results.pop(0)]

    def submit_control(self, control: Control) -> None:
        """Nothing is told."""

    def expert_load(self) -> Counts:
        return self.groups.expert_load

    def close(self) -> None:
        pass


def step(rank: int, folder: Path, segment_fd: int) -> list[list[object]]:
    """One row: milliseconds of a decode step over sockets and over shared memory, and exchanges of a step."""
    config = EngineConfig.from_options(
        model="demo", tensor_parallel_size=2, cpu_threads=1, distributed_executor_backend="threads"
    )
    together = resolve_here(config)
    places = [msgspec.structs.replace(place, host=host) for host, place in enumerate(together.placements[0])]
    apart = msgspec.structs.replace(together, placements=(tuple(places),))
    num_bytes = segment_layout(together, 0, 0).num_bytes
    os.ftruncate(segment_fd, num_bytes)
    shared = memoryview(mmap.mmap(segment_fd, num_bytes))
    meeting = Meeting(FolderStore(folder), ADDRESSES[rank], b"only for a benchmark", PATIENCE_S)
    executors = [
        OneRank(apart, rank, memoryview(mmap.mmap(-1, num_bytes)), meeting),
        OneRank(together, rank, shared, meeting),
    ]
    engines = []
    for executor, deployment in zip(executors, (apart, together), strict=True):
        executor.start()
        engines.append(Engine(deployment, executor))
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=0, ignore_eos=True)

    def decode(engine: Engine) -> float:
        engine.add_request(
            Request(request_id="r", prompt_token_ids=list(range(100, 100 + PROMPT_LEN)), sampling=sampling)
        )
        engine.step()
        times = []
        while engine.busy:
            began = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    sockets_s, shared_s = medians([lambda: decode(engines[0]), lambda: decode(engines[1])])
    arrivals = int(executors[0].groups.progress.exchanges[0])
    return [[1e3 * sockets_s, 1e3 * shared_s, arrivals / (BLOCKS * NUM_TOKENS)]]


def plan(rank: int, folder: Path, _segment: int) -> list[list[object]]:
    """One row: microseconds of one way of plans and of results, medians and 90th percentiles.

    Time ends when the thread that runs steps has the plan, or the engine has the result. Both hosts have one clock.
    """
    store, nonce = FolderStore(folder), b"only for a benchmark"
    if rank == 1:
        received = answer_plans(store.get("engine", PATIENCE_S).decode(), nonce)
        store.set("received", json.dumps(received).encode())
        return []
    arrivals = Arrivals(ADDRESSES[0], nonce, [steps_of(1)])
    store.set("engine", arrivals.address.encode())
    sock, seal = arrivals.finish(time.monotonic() + PATIENCE_S)[steps_of(1)]
    line: Channel[StepReply] = Channel(sock, StepReply, seal)  # type: ignore[arg-type]
    steps = [SequenceStep(number, 500, 1, [[]], -1, sample=True) for number in range(PLAN_SEQUENCES)]
    sent, answered = [], []
    for number in range(PLANS):
        time.sleep(PLAN_INTERVAL_S)
        sent.append(time.monotonic())
        line.send(RunStep(RankStep(StepPlan(number, [], steps, []), (PLAN_SEQUENCES,), (PLAN_SEQUENCES,))))
        assert isinstance(line.receive(PATIENCE_S), StepDone)
        answered.append(time.monotonic())
    line.send(Control.carry(0, Probe()))
    received = json.loads(store.get("received", PATIENCE_S))
    ways = [[(b - a) * 1e6 for a, b in zip(*pair, strict=True)] for pair in ((sent, received), (received, answered))]
    return [[figure for way in ways for figure in (statistics.median(way), statistics.quantiles(way, n=10)[-1])]]


def answer_plans(address: str, nonce: bytes) -> list[float]:
    """Play a rank that answers plans at once; returns when each plan had come."""
    sock, seal = connect_to_engine(address, nonce, 1, PATIENCE_S)
    line: Channel[StepRequest] = Channel(sock, StepRequest, seal)  # type: ignore[arg-type]
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=read_line, args=(line, events), daemon=True).start()
    tokens = [SequenceResult(number, [number]) for number in range(PLAN_SEQUENCES)]
    received = []
    while not isinstance(step := events.get(), Control):
        received.append(time.monotonic())
        assert isinstance(step, RankStep)
        line.send(StepDone(StepResult(step.plan.step_id, tokens)))
    return received


CASES = {"gather": gather, "plan": plan, "step": step}


def main() -> None:
    """Run the cases; with --rank, one rank of a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", choices=[*CASES, *SERVER_CASES, []])
    for name, kind in (("--rank", int), ("--folder", Path), ("--segment", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        torch.set_num_threads(1)
        rows = CASES[options.case[0]](options.rank, options.folder, options.segment)
        if options.rank == 0:
            print(json.dumps(rows))
        return
    for case in options.case or [*CASES, *SERVER_CASES]:
        if case in SERVER_CASES:
            with two_namespaces() as names:
                print(SERVER_CASES[case](names))
            continue
        rows = run_ranks(case)
        if case == "gather":
            print(f"{'bytes':>10} {'gather':>10} {'bare':>10}   ratio")
            for size, ours, bare in rows:
                print(f"{size:>10} {ours:>7.1f} us {bare:>7.1f} us   {ours / bare:.2f}")  # type: ignore[operator]
        elif case == "plan":
            [[plan_us, plan_p90, result_us, result_p90]] = rows
            print(
                f"plan: {plan_us:.0f} us one way, p90 {plan_p90:.0f}; result: {result_us:.0f} us, p90 {result_p90:.0f}"
            )
        else:
            [[over_sockets, over_memory, exchanges]] = rows
            print(
                f"step: {over_sockets:.2f} ms over sockets, {over_memory:.2f} ms over shared memory; "
                f"{exchanges:.1f} exchanges"
            )


if __name__ == "__main__":
    main()
