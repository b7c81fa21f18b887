"""A worker ends when its job exceeds a limit, and nothing else ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.sandbox.blocking import receive_blocking
from shardline.sandbox.client import Sandbox
from shardline.sandbox.confinement import Limit
from shardline.sandbox.worker import Worker, WorkerEnded

MEMORY = 64 << 20


@pytest.fixture(scope="module", autouse=True)
def _import_path() -> Iterator[None]:
    """Where a nursery finds the service of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox("tests.sandbox.service", "hello ", title="sandbox test", memory=MEMORY)
    yield made
    made.close()


def ask(worker: Worker, job: str, seconds: float = 5.0) -> str:
    worker.send(job.encode(), seconds)
    return receive_blocking(worker, 20.0).decode()


def runs(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        if not any(runs(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def test_a_worker_answers_one_job_after_another(sandbox):
    with contextlib.closing(sandbox.fork()) as worker:
        assert [ask(worker, word) for word in ("you", "there", "")] == ["hello you", "hello there", "hello "]


def test_jobs_may_be_sent_before_earlier_ones_are_answered(sandbox):
    with contextlib.closing(sandbox.fork()) as worker:
        answers: list[bytes] = []
        for number in range(50):
            worker.send(str(number).encode(), 1.0)
        while len(answers) < 50:
            answers += worker.take_answers()
        assert answers == [f"hello {number}".encode() for number in range(50)]


@pytest.mark.parametrize(
    ("job", "limit"),
    [
        ("spin", Limit.TIME),
        ("fill", Limit.MEMORY),
        ("abort", Limit.MEMORY),
        ("overflow", Limit.STACK),
    ],
)
def test_a_job_that_exceeds_a_limit_costs_its_worker_only(sandbox, job, limit):
    with contextlib.closing(sandbox.fork()) as other, contextlib.closing(sandbox.fork()) as worker:
        assert ask(other, "a") == "hello a"
        with pytest.raises(WorkerEnded) as ended:
            ask(worker, job, 0.2 if limit is Limit.TIME else 20.0)
        assert ended.value.limit is limit
        assert ask(other, "b") == "hello b"


def test_a_worker_that_neither_answers_nor_computes_is_killed(sandbox):
    with contextlib.closing(sandbox.fork()) as worker:
        pid = int(ask(worker, "pid"))
        worker.send(b"sleep", 1.0)
        with pytest.raises(WorkerEnded):
            receive_blocking(worker, 0.1)
        assert wait_until_gone([pid])


def test_a_closed_worker_ends_in_the_middle_of_its_job(sandbox):
    worker = sandbox.fork()
    pid = int(ask(worker, "pid"))
    worker.send(b"spin", 100.0)
    worker.close()
    assert wait_until_gone([pid])


def test_an_error_of_the_service_is_not_the_jobs_fault(sandbox):
    with contextlib.closing(sandbox.fork()) as worker:
        with pytest.raises(RuntimeError, match="a mistake of the service"):
            ask(worker, "raise")
        assert ask(worker, "a") == "hello a"


def test_the_nursery_starts_again():
    with contextlib.closing(Sandbox("tests.sandbox.service", title="sandbox", memory=MEMORY)) as sandbox:
        first = sandbox.fork()
        assert ask(first, "a") == "a"
        assert sandbox.pid is not None
        os.kill(sandbox.pid, signal.SIGKILL)
        with pytest.raises(WorkerEnded):
            ask(first, "sleep")
        with contextlib.closing(sandbox.fork()) as second:
            assert ask(second, "b") == "b"
        first.close()


def test_nothing_outlives_a_client_that_is_killed_even_if_it_was_stopped():
    code = (
        "import time; from shardline.sandbox.blocking import receive_blocking\n"
        "from shardline.sandbox.client import Sandbox\n"
        "s = Sandbox('tests.sandbox.service', title='t', memory=1 << 26); w = s.fork(); w.send(b'pid', 1.0)\n"
        "print(receive_blocking(w, 20.0).decode(), s.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        pids = [int(word) for word in client.stdout.readline().split()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        client.kill()
        assert wait_until_gone(pids)


def test_the_nursery_gets_no_secret(monkeypatch):
    from shardline import env

    monkeypatch.setenv("SHARDLINE_API_KEY", "sk-1")
    monkeypatch.setenv("HF_TOKEN", "hf-1")
    monkeypatch.setenv("LANG", "C.UTF-8")
    given = env.for_sandbox()
    assert "LANG" in given
    assert not {"sk-1", "hf-1"} & set(given.values())
