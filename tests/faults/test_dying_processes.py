"""Real processes that are killed, stopped or orphaned: the failure is named and bounded, and nobody is left behind.

Most are forks, to spare imports. Fresh ones are where the way of starting matters.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardline
from tests.faults.processes import Replica, assert_all_end, clean_up, command_line
from tests.models.checkpoints import make_checkpoint


@pytest.fixture
def replica() -> Iterator[Replica]:
    replica = Replica(step_timeout=2.0)
    yield replica
    clean_up(replica)


@pytest.fixture
def forked_replica(forked_engines: None) -> Iterator[Replica]:
    replica = Replica(step_timeout=2.0, tensor_parallel_size=2)
    yield replica
    clean_up(replica)


@pytest.fixture
def expert_parallel(request: pytest.FixtureRequest, tmp_path: Path, forked_engines: None) -> Iterator[Replica]:
    """Ranks that spend most of their time in exchanges of tokens."""
    model = make_checkpoint("qwen3_moe", tmp_path / "model", max_position_embeddings=2048)
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "collectives": request.param}
    replica = Replica(2.0, str(model), **options)
    yield replica
    clean_up(replica)


@pytest.mark.parametrize("start", ["replica", "forked_replica"], ids=["busy", "idle"])
def test_a_killed_rank_is_named(start: str, request: pytest.FixtureRequest) -> None:
    replica: Replica = request.getfixturevalue(start)
    if start == "replica":
        replica.start_long_request()
    victim = replica.worker_pids[1]
    os.kill(victim, signal.SIGKILL)
    message = replica.failure(timeout=10)
    assert "rank 1 (pp 0, tp 1)" in message
    assert f"pid {victim}" in message
    assert "signal 9" in message
    assert_all_end([replica.engine_pid, *replica.worker_pids], within=10)


@pytest.mark.usefixtures("forked_engines")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_replica_in_lockstep_that_is_gone_ends_the_step_with_its_name(tmp_path: Path, number: int) -> None:
    """The other replica has the request, and waits for the idle one in the exchange of experts."""
    model = str(make_checkpoint("qwen3_moe", tmp_path))
    replica = Replica(2.0, model, data_parallel_size=2, enable_expert_parallel=True)
    try:
        replica.start_long_request(200)
        victim = replica.worker_pids[1]
        os.kill(victim, number)
        message = replica.failure(timeout=10)
        assert "rank 1 (dp 1, pp 0, tp 0)" in message
        assert "rank 0" not in message
        assert ("signal 9" if number == signal.SIGKILL else "is stalled") in message
        assert_all_end([replica.engine_pid, *replica.worker_pids], within=10)
    finally:
        clean_up(replica)


# A rank that is stopped in the middle of one of gloo's exchanges looks like the one that waits for its bytes.
@pytest.mark.parametrize(
    ("expert_parallel", "sent"),
    [("shm", signal.SIGKILL), ("shm", signal.SIGSTOP), ("gloo", signal.SIGKILL)],
    indirect=["expert_parallel"],
)
def test_a_rank_that_goes_in_an_exchange_of_tokens_is_named(expert_parallel: Replica, sent: signal.Signals) -> None:
    expert_parallel.start_long_request()
    os.kill(expert_parallel.worker_pids[1], sent)
    message = expert_parallel.failure(timeout=10)
    assert "rank 1 (pp 0, tp 1)" in message
    assert "rank 0" not in message
    assert_all_end([expert_parallel.engine_pid, *expert_parallel.worker_pids], within=10)


def test_a_stopped_rank_is_named_at_the_deadline(forked_replica: Replica) -> None:
    replica = forked_replica
    replica.start_long_request()
    victim = replica.worker_pids[1]
    os.kill(victim, signal.SIGSTOP)
    failed = replica.await_failure(timeout=10)
    message = failed.message
    assert failed.suspicious
    assert failed.stalled_for == 2.0
    assert "no rank has finished anything for 2 s" in message
    assert "rank 1 (pp 0, tp 1)" in message
    assert "rank 0" not in message
    assert_all_end([replica.engine_pid, *replica.worker_pids], within=10)


def test_ranks_end_with_their_engine(replica: Replica) -> None:
    replica.start_long_request()
    os.kill(replica.engine_pid, signal.SIGKILL)
    failed = replica.await_failure(timeout=10)
    assert "killed by signal 9" in failed.message
    assert not failed.suspicious
    assert_all_end(replica.worker_pids, within=10)


@pytest.mark.parametrize("are_stopped", [False, True], ids=["running", "stopped"])
def test_everything_ends_with_the_front(are_stopped: bool) -> None:
    """What is stopped cannot see that its parent has ended."""
    script = """
import sys, time
from shardline.config.engine import EngineConfig
from shardline.engine.start import start_engine
from shardline.engine.client import EngineClient
from shardline.deployment.here import resolve_here
config = EngineConfig.from_options(model="demo", tensor_parallel_size=2)
client = EngineClient(resolve_here(config), 0, print, start_engine, b"")
print(*client.wait_ready(60).report, client._child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        line = front.stdout.readline()
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", line)] + [int(line.split()[-1])]
        assert len(pids) == 3
        if are_stopped:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        front.kill()
    assert_all_end(pids, within=10)


def test_a_hung_load_ends_with_the_front() -> None:
    """A rank that stops while it loads has no deadline; the front's end is one."""
    script = """
import sys, time
from shardline.config.engine import EngineConfig
from shardline.engine.start import start_engine
from shardline.engine.client import EngineClient
from shardline.deployment.here import resolve_here
config = EngineConfig.from_options(model="demo", tensor_parallel_size=2)
client = EngineClient(resolve_here(config), 0, print, start_engine, b"")
print(client._child.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        engine = int(front.stdout.readline())
        deadline = time.monotonic() + 20
        while len(children := children_of(engine)) < 2 or not all(map(is_worker, children)):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(children[1], signal.SIGSTOP)
        front.kill()
    assert_all_end([engine, *children], within=15)


def test_code_in_the_current_directory_is_not_imported(tmp_path: Path) -> None:
    """A model's folder is a place to start `serve` from, and must not bring code along."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit('imported from the current directory')")
    script = """
from shardline.config.engine import EngineConfig
from shardline.engine.start import start_engine
from shardline.engine.client import EngineClient
from shardline.deployment.here import resolve_here
config = EngineConfig.from_options(model="demo", distributed_executor_backend="mp")
client = EngineClient(resolve_here(config), 0, print, start_engine, b"")
client.wait_ready(60)
client.close()
"""
    source = Path(shardline.__file__).parent.parent
    command = f"import sys; sys.path[0] = {str(source)!r}\n{script}"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


def is_worker(pid: int) -> bool:
    """Whether the process is about to load."""
    return command_line(pid).startswith("shardline: rank")


def children_of(pid: int) -> list[int]:
    """The processes that any thread of a process has started."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for task in tasks for child in task.read_text().split())
