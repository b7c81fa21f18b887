"""Blocks that are copied to a tier and back have the same bits, in every layout of ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardline.kernels.block_copies import checksum
from shardline.messages.copies import BlockCopy
from shardline.messages.stats import EngineStats
from shardline.runtime.tiers.host import HostTier, _Content
from tests.exactness.harness import Answer, _tight_pool, golden, make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint

REQUESTS = make_requests(256)
LONGEST = max(len(request.prompt_token_ids) + (request.sampling.max_tokens or 0) for request in REQUESTS)

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one-rank": ("llama", {}),
    "bytes": ("llama", {"kv_cache_dtype": "int8", "tensor": 2}),
    "grid": ("llama", {"tensor": 2, "pipeline": 2}),
    "windows": ("gemma3_text", {"tensor": 2}),
    "unlike-pages": ("gemma4_text", {}),
    "shared-pool": ("deepseek_v3", {"tensor": 3}),
    "shared-pool-of-bytes": ("deepseek_v3", {"tensor": 2, "pipeline": 2, "kv_cache_dtype": "int8"}),
    "lockstep": ("qwen3_moe", {"lockstep": 2, "enable_expert_parallel": True}),
}


@contextmanager
def altered(alter: Callable[[HostTier, BlockCopy], None]) -> Iterator[None]:
    """Every block that is fetched from a slot is altered before."""
    fetch = HostTier._fetch

    def alter_and_fetch(tier: HostTier, copy: BlockCopy) -> bool:
        alter(tier, copy)
        return fetch(tier, copy)

    with patch.object(HostTier, "_fetch", alter_and_fetch):
        yield


def answers_of(
    model: Path, size: float, folder: Path | None = None, **options: object
) -> tuple[dict[str, Answer], EngineStats]:
    """All requests three times in a pool that is too small for their prefixes, with a tier of `size` MiB; the last
    answers. Engines with the same folder have the same namespace."""
    if size:
        options["kv_offloading_size"] = size / 1024
    if folder is not None:
        options["kv_offloading_dir"] = str(folder)
    engine, executor = start_engine(
        model,
        namespace=None if folder is None else b"namespace of a folder",
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
    return answers, stats


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_are_those_without_a_tier(layout: str, tmp_path: Path) -> None:
    """From host memory; and once more by engines that find all in files."""
    family, options = LAYOUTS[layout]
    model = make_checkpoint(family, tmp_path / "model")
    expected = golden(model, "bfloat16", "none", str(options.get("kv_cache_dtype", "auto")), REQUESTS)
    answers, stats = answers_of(model, 4, **options)
    assert answers == expected
    for one in stats.in_lockstep or [stats]:
        assert one.tier is not None
        assert one.tier.hits > 0
        assert (one.tier.lost_blocks, one.tier.copies.corrupt_blocks) == (0, 0)
        assert one.tier.copies.fetched_bytes > 0


def test_answers_are_those_of_files_after_a_restart(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "model")
    expected = golden(model, "bfloat16", "none", "auto", REQUESTS)
    for run_number in range(2):
        answers, stats = answers_of(model, 0.05, tmp_path / "blocks", tensor=2, pipeline=2)
        assert answers == expected
        assert stats.tier is not None
        copies = stats.tier.copies
        assert copies.read_bytes > 0
        assert (copies.corrupt_blocks, copies.file_errors) == (0, 0)
        assert (copies.written_bytes > 0) == (run_number == 0)


def test_blocks_that_any_rank_has_lost_are_computed_again(tmp_path: Path) -> None:
    """Each rank loses some, and so may a rank that does not report what is sampled: one bit of a slot changes."""
    model = make_checkpoint("llama", tmp_path)
    expected = golden(model, "bfloat16", "none", "auto", REQUESTS)
    rng, flips = random.Random(5), 0

    def flip(tier: HostTier, copy: BlockCopy) -> None:
        nonlocal flips
        if rng.random() < 0.3:
            flips += 1
            size = tier._sizes[copy.group]
            tier._memory[copy.slot, rng.randrange(size)] ^= 1 << rng.randrange(8)

    with altered(flip):
        answers, stats = answers_of(model, 4, tensor=2, pipeline=2)
    assert answers == expected
    assert stats.tier is not None
    assert stats.tier.copies.corrupt_blocks == flips > 20
    assert 0 < stats.tier.lost_blocks <= flips


def test_what_is_fetched_is_read(tmp_path: Path) -> None:
    """Else the other tests would show nothing."""
    model = make_checkpoint("llama", tmp_path)
    expected = golden(model, "bfloat16", "none", "auto", REQUESTS)

    def negate(tier: HostTier, copy: BlockCopy) -> None:
        slot = tier._slot(copy.group, copy.slot)
        slot.view(torch.bfloat16).neg_()
        tier._contents[copy.slot] = _Content(copy.key, checksum(slot))

    with altered(negate):
        answers, stats = answers_of(model, 4)
    assert answers != expected
    _, without = answers_of(model, 0)
    assert without.tier is None
    assert stats.prefix_hits > without.prefix_hits
