"""A pool keeps workers, runs short jobs beside long ones, and gives no abandoned job time."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.sandbox import blocking
from shardline.sandbox import pool as pools
from shardline.sandbox.blocking import Setup
from shardline.sandbox.client import Sandbox
from shardline.sandbox.confinement import Limit
from shardline.sandbox.pool import Pool
from shardline.sandbox.worker import WorkerEnded
from tests.sandbox.test_sandbox import MEMORY, wait_until_gone


@pytest.fixture(scope="module", autouse=True)
def _import_path() -> Iterator[None]:
    """Where a nursery finds the service of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox("tests.sandbox.service", title="pool test", memory=MEMORY)
    yield made
    made.close()


@pytest.fixture
def pool(sandbox) -> Iterator[Pool]:
    made = Pool(sandbox)
    yield made
    made.close()


async def ask(pool: Pool, job: str, seconds: float = 5.0) -> str:
    return (await pool.run(job.encode(), seconds)).decode()


def test_workers_are_kept_and_shared_by_loops_and_threads(pool):
    async def main() -> str:
        await pool.start()
        first = await ask(pool, "pid")
        assert await ask(pool, "pid") == first
        return first

    first = asyncio.run(main())
    assert pool.run_blocking(b"pid", 5.0).decode() == first
    assert asyncio.run(ask(pool, "pid")) == first


def test_jobs_begin_in_order_and_several_run_at_once(pool):
    async def main() -> None:
        ended: list[int] = []

        async def job(number: int) -> None:
            assert await ask(pool, "nap" if number < 4 else str(number)) == ("nap" if number < 4 else str(number))
            ended.append(number)

        await asyncio.gather(*(job(number) for number in range(40)))
        assert sorted(ended) == list(range(40))

    asyncio.run(main())


def test_large_jobs_and_answers(pool):
    body = b"x" * (3 << 20)
    assert asyncio.run(pool.run(body, 5.0)) == body
    assert pool.run_blocking(body, 5.0) == body


@pytest.mark.parametrize(("job", "limit"), [("spin", Limit.TIME), ("fill", Limit.MEMORY), ("overflow", Limit.STACK)])
def test_a_job_that_exceeds_a_limit_costs_its_worker_only(monkeypatch, pool, job, limit):
    for module in (pools, blocking):
        monkeypatch.setattr(module, "WALL_FACTOR", 100)  # a busy machine gives long jobs little time

    async def main() -> None:
        with pytest.raises(WorkerEnded) as ended:
            await ask(pool, job, 0.3)
        assert ended.value.limit is limit
        assert await ask(pool, "a") == "a"

    asyncio.run(main())
    with pytest.raises(WorkerEnded) as ended:
        pool.run_blocking(job.encode(), 0.2)
    assert ended.value.limit is limit
    assert pool.run_blocking(b"a", 5.0) == b"a"


def test_a_job_that_neither_answers_nor_computes_ends_too(pool):
    with pytest.raises(WorkerEnded, match="deadline"):
        asyncio.run(ask(pool, "sleep", 0.05))
    with pytest.raises(WorkerEnded, match="deadline"):
        pool.run_blocking(b"sleep", 0.05)


def test_an_abandoned_job_is_killed(pool):
    async def main() -> None:
        pid = int(await ask(pool, "pid"))
        job = asyncio.create_task(ask(pool, "spin", 100.0))
        await asyncio.sleep(0.3)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        assert wait_until_gone([pid])
        assert await ask(pool, "a") == "a"

    asyncio.run(main())


def test_long_jobs_do_not_keep_short_ones_waiting(pool):
    async def main() -> None:
        await pool.start()
        jobs = [asyncio.create_task(ask(pool, "spin", 100.0)) for _ in range(8)]
        await asyncio.sleep(0.1)
        started = time.monotonic()
        assert await ask(pool, "a") == "a"
        assert time.monotonic() - started < 4.0
        assert not any(job.done() for job in jobs)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    asyncio.run(main())


def test_a_turn_that_is_cancelled_goes_to_the_next_job(pool):
    async def main() -> None:
        jobs = [asyncio.create_task(ask(pool, "sleep", 100.0)) for _ in range(20)]
        await asyncio.sleep(0.1)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert await asyncio.wait_for(ask(pool, "a"), 10.0) == "a"

    asyncio.run(main())


def test_a_nursery_that_is_killed_or_stuck_starts_again(monkeypatch, sandbox, pool):
    asyncio.run(ask(pool, "a"))
    assert sandbox.pid is not None
    os.kill(sandbox.pid, signal.SIGKILL)
    assert wait_until_gone([sandbox.pid])
    assert asyncio.run(ask(pool, "b")) == "b"

    stuck = sandbox.pid
    os.kill(stuck, signal.SIGSTOP)
    pool.close()
    fresh = Pool(sandbox)
    with monkeypatch.context() as patch:
        patch.setattr(pools, "START_SECONDS", 3.0)
        assert asyncio.run(ask(fresh, "c")) == "c"
    assert sandbox.pid != stuck
    assert wait_until_gone([stuck])
    fresh.close()


def test_every_worker_does_the_setup(sandbox):
    pool = Pool(sandbox, Setup(b"spin", 0.1))
    with pytest.raises(WorkerEnded):
        pool.run_blocking(b"a", 5.0)
    with pytest.raises(WorkerEnded):
        asyncio.run(ask(pool, "a"))
    pool.close()
    pool = Pool(sandbox, Setup(b"a", 5.0))
    assert pool.run_blocking(b"b", 5.0) == b"b"
    pool.close()


def test_a_closed_pool_ends_its_jobs(sandbox):
    pool = Pool(sandbox)

    async def main() -> None:
        job = asyncio.create_task(ask(pool, "sleep", 100.0))
        await asyncio.sleep(0.5)
        pool.close()
        with pytest.raises(WorkerEnded):
            await job

    asyncio.run(main())
