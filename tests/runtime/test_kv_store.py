"""Blocks that are copied to a tier and back have the same bits, in every layout of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardline.engine import engine as engine_module
from shardline.engine.scheduling.scheduler import Scheduler
from shardline.messages.stats import EngineStats
from shardline.runtime.kv_store import KVStore
from shardline.runtime.worker import Worker
from tests.engine.lru_tier import LruTier
from tests.exactness.harness import Answer, _tight_pool, golden, make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint

REQUESTS = make_requests(256)
LONGEST = max(len(request.prompt_token_ids) + (request.sampling.max_tokens or 0) for request in REQUESTS)

LAYOUTS: dict[str, tuple[str, dict[str, object]]] = {
    "one-rank": ("llama", {}),
    "bytes": ("llama", {"kv_cache_dtype": "int8", "tensor": 2}),
    "grid": ("llama", {"tensor": 2, "pipeline": 2}),
    "windows": ("gemma3_text", {"tensor": 2}),
    "unlike-pages": ("gemma4_text", {}),
    "shared-pool": ("deepseek_v3", {"tensor": 3}),
    "shared-pool-of-bytes": ("deepseek_v3", {"tensor": 2, "pipeline": 2, "kv_cache_dtype": "int8"}),
    "lockstep": ("qwen3_moe", {"lockstep": 2, "enable_expert_parallel": True}),
}


class HostMemory:
    """A rank's part of a tier, which hands content out as `alter` has changed it; None: it is lost."""

    def __init__(self, alter: Callable[[Tensor], Tensor | None]) -> None:
        self._alter = alter
        self._slots: dict[int, list[Tensor]] = {}

    def write(self, slot: int, pages: Sequence[Tensor]) -> None:
        self._slots[slot] = [page.clone() for page in pages]

    def read(self, slot: int, pages: Sequence[Tensor]) -> bool:
        for page, content in zip(pages, self._slots[slot], strict=True):
            altered = self._alter(content)
            page.copy_(torch.zeros_like(page) if altered is None else altered)
            if altered is None:
                return False
        return True


@contextmanager
def tiers(num_slots: int, alter: Callable[[int, Tensor], Tensor | None]) -> Iterator[list[LruTier]]:
    """Engines that start have a tier for each replica. `alter`: for a rank, see `HostMemory`."""
    made: list[LruTier] = []
    allocate = Worker._allocate_cache

    def make_scheduler(*args: object, **options: object) -> Scheduler:
        scheduler = Scheduler(*args, **options)  # type: ignore[arg-type]
        made.append(LruTier(num_slots))
        scheduler.kv.add_tier(made[-1])
        return scheduler

    def allocate_with_tier(worker: Worker, *args: object) -> KVStore:
        store = allocate(worker, *args)  # type: ignore[arg-type]
        rank = worker._groups.place.rank
        store.tier = HostMemory(lambda content: alter(rank, content))
        return store

    with (
        patch.object(engine_module, "Scheduler", make_scheduler),
        patch.object(Worker, "_allocate_cache", allocate_with_tier),
    ):
        yield made


def answers_of(
    model: Path, num_slots: int, alter: Callable[[int, Tensor], Tensor | None], **options: object
) -> tuple[dict[str, Answer], list[LruTier], EngineStats]:
    """All requests three times in a pool that is too small for their prefixes; the last answers."""
    with tiers(num_slots, alter) as made:
        engine, executor = start_engine(
            model,
            dtype="bfloat16",
            max_num_batched_tokens=32,
            max_model_len=LONGEST,
            num_gpu_blocks_override=_tight_pool(model, LONGEST, 32) + 2,
            **options,  # type: ignore[arg-type]
        )
        try:
            for batch in ("staggered", "together", "staggered"):
                answers = run(engine, REQUESTS, batch)
            stats = engine.stats()
        finally:
            engine.close()
            executor.close()
    assert stats.kv_blocks_used == 0
    assert not any(tier.fetching for tier in made)
    return answers, made, stats


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_are_those_without_a_tier(layout: str, tmp_path: Path) -> None:
    family, options = LAYOUTS[layout]
    model = make_checkpoint(family, tmp_path)
    expected = golden(model, "bfloat16", "none", str(options.get("kv_cache_dtype", "auto")), REQUESTS)
    answers, made, _ = answers_of(model, 60, lambda rank, content: content, **options)
    assert answers == expected
    assert all(tier.num_fetched > 0 for tier in made)
    assert not any(tier.num_lost for tier in made)


def test_blocks_that_any_rank_has_lost_are_computed_again(tmp_path: Path) -> None:
    """Each rank loses some, and so may a rank that does not report what is sampled."""
    model = make_checkpoint("llama", tmp_path)
    expected = golden(model, "bfloat16", "none", "auto", REQUESTS)
    for loser in (0, 3):
        reads = 0

        def alter(rank: int, content: Tensor, loser: int = loser) -> Tensor | None:
            nonlocal reads
            reads += rank == loser
            return None if rank == loser and reads % 3 == 1 else content

        answers, (tier,), _ = answers_of(model, 60, alter, tensor=2, pipeline=2)
        assert answers == expected
        assert tier.num_lost > 0


def test_what_is_fetched_is_read(tmp_path: Path) -> None:
    """Else the other tests would show nothing."""
    model = make_checkpoint("llama", tmp_path)
    expected = golden(model, "bfloat16", "none", "auto", REQUESTS)
    answers, _, stats = answers_of(model, 60, lambda rank, content: content.neg())
    assert answers != expected
    _, _, without = answers_of(model, 0, lambda rank, content: content)
    assert stats.prefix_hits > without.prefix_hits
