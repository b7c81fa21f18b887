"""The KV pool from what the ranks measure: they agree on the smallest, and a refusal says what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

import shardline
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment, FixedPool, MeasuredPool
from shardline.deployment.here import resolve_here
from shardline.deployment.kv_budget import MemoryUse, agree_allocation, explain, fixed_allocation
from shardline.engine.children import Child
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.engine.executor.base import Executor
from shardline.engine.report import startup_report
from shardline.messages.worker import RankReport
from shardline.models.sizes import kv_block_bytes
from tests.engine import measuring_worker
from tests.engine.measuring_worker import MIB
from tests.exactness.harness import make_requests
from tests.models.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def measuring(model: Path, *, gpu_memory_utilization: float = 0.9, **options: object) -> Deployment:
    """A deployment whose ranks measure, as on GPUs."""
    chosen = {"kv_cache_memory": "8MiB", "cpu_threads": 1, "max_model_len": 64, "max_num_seqs": 8, "block_size": 16}
    resolved = resolve_here(EngineConfig.from_options(model=str(model), device="cpu", **(chosen | options)))
    return with_pool(resolved, MeasuredPool(gpu_memory_utilization))


def with_pool(deployment: Deployment, pool: FixedPool | MeasuredPool) -> Deployment:
    return replace(deployment, cache=replace(deployment.cache, pool=pool))


def agreed_blocks(deployment: Deployment, measured: Sequence[MemoryUse]) -> int:
    return agree_allocation(deployment, measured).num_blocks


def use(total: int, step: int = 0) -> MemoryUse:
    return MemoryUse(total=total, others=0, weights=0, step=step, graphs=0)


def block_bytes(setup: Deployment, rank: int) -> int:
    cache, place = setup.cache, setup.grid.place(rank)
    return kv_block_bytes(setup.spec, cache.groups, place, setup.stages, setup.dtype, cache.block_size)


def test_the_rank_that_fits_the_fewest_blocks_decides(model: Path) -> None:
    setup = measuring(model, pipeline_parallel_size=2, pipeline_stages="3,1", gpu_memory_utilization=1.0)
    assert fixed_allocation(setup) is None
    deep, shallow = block_bytes(setup, 0), block_bytes(setup, 1)
    assert deep == 3 * shallow
    assert agreed_blocks(setup, [use(30 * deep), use(100 * shallow)]) == 30
    assert agreed_blocks(setup, [use(30 * deep), use(20 * shallow)]) == 20
    assert agreed_blocks(setup, [use(10**12), use(10**12)]) == 64 * 4 + 1, "no more than requests can use"


def test_a_refusal_says_what_fits(model: Path) -> None:
    setup = measuring(model, gpu_memory_utilization=0.5)
    block = block_bytes(setup, 0)
    # Blocks of 16 tokens, one of them the null block: 2 are 32 tokens.
    with pytest.raises(ValueError, match=r"one request of 64 tokens .* rank 0: 0\.5 x .* lower --max-model-len to 32,"):
        agreed_blocks(setup, [use(2 * 3 * block)])
    with pytest.raises(ValueError, match=r"= -.* for the KV cache; lower --max-num-batched-tokens \(2048\)"):
        agreed_blocks(setup, [use(2 * 3 * block, step=10 * block)])


def test_the_sum_is_told() -> None:
    memory = MemoryUse(total=100 * MIB, others=5 * MIB, weights=40 * MIB, step=10 * MIB, graphs=MIB)
    assert memory.room(0.9) == 34 * MIB
    assert explain(memory, 0.9) == (
        "0.9 x 100.00 MiB - 5.00 MiB (driver and others) - 40.00 MiB (weights) - 10.00 MiB (the largest step) - "
        "1.00 MiB (graphs) = 34.00 MiB for the KV cache"
    )


@pytest.fixture
def measuring_workers(monkeypatch: pytest.MonkeyPatch, forked_engines: None) -> None:
    path = [str(Path(shardline.__file__).parents[1]), str(ROOT)]
    code = f"import sys; sys.path[:0] = {path}; from tests.engine.measuring_worker import main; main()"
    monkeypatch.setattr(Child, "code", lambda self, module: code)


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_measure_agree_and_answer(model: Path, layout: dict[str, int], measuring_workers: None) -> None:
    setup = measuring(model, **layout, max_num_seqs=64, max_num_batched_tokens=32)
    executor = make_executor(setup)
    try:
        reports = executor.start()
        smallest = int(measuring_worker.TOTALS[1] * 0.9) - 16 * MIB
        expected = smallest // block_bytes(setup, 1)
        assert 200 < expected * setup.cache.block_size < 64 * 64
        assert executor.allocation.num_blocks == expected
        held = [report.kv_bytes // block_bytes(setup, rank) for rank, report in enumerate(reports)]
        assert held == [expected] * 2
        assert reports[0].memory == MemoryUse(total=64 * MIB, others=5 * MIB, weights=8 * MIB, step=3 * MIB, graphs=0)
        assert "rank 1 memory: 0.9 x 18.00 MiB - " in report_of(setup, executor, reports)
        answers = answers_of(setup, executor)
    finally:
        executor.close()
    plain = with_pool(measuring(model, distributed_executor_backend="uni"), FixedPool(201))
    executor = make_executor(plain)
    try:
        assert "rank 0 memory: " not in report_of(plain, executor, executor.start())
        assert answers_of(plain, executor) == answers
    finally:
        executor.close()


def report_of(deployment: Deployment, executor: Executor, reports: Sequence[RankReport]) -> str:
    return "\n".join(startup_report(deployment, 0, executor.allocation, list(reports), {}))


def answers_of(deployment: Deployment, executor: Executor) -> dict[str, list[int]]:
    """The tokens of a few requests."""
    engine = Engine(deployment, executor)
    tokens: dict[str, list[int]] = {}
    for request in make_requests(deployment.spec.vocab_size, count=3):
        engine.add_request(request)
        tokens[request.request_id] = []
    while engine.busy:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return tokens
