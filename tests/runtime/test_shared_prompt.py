"""Sequences that share whole splits of keys attend to them as one tile, with the bits that each has alone."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from shardline.messages.request import Request
from tests.exactness.harness import golden, make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint

LONG = 1040


def long_requests() -> list[Request]:
    """Two splits in common, then tails of their own; one request has another beginning."""
    rng = random.Random(5)
    common = [rng.randrange(256) for _ in range(LONG)]
    prompts = [common + [rng.randrange(256) for _ in range(1 + 7 * index)] for index in range(5)]
    prompts.insert(2, [rng.randrange(256) for _ in range(LONG)])
    requests = make_requests(256, count=len(prompts))
    return [msgspec.structs.replace(r, prompt_token_ids=p) for r, p in zip(requests, prompts, strict=True)]


@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_one_answer(tensor: int, kv: str, tmp_path: Path) -> None:
    model = make_checkpoint("qwen2", tmp_path, max_position_embeddings=2048, num_hidden_layers=2)
    requests = long_requests()
    expected = golden(model, "bfloat16", "none", kv, requests)
    engine, executor = start_engine(model, tensor=tensor, dtype="bfloat16", kv_cache_dtype=kv)
    try:
        assert run(engine, requests, "together") == expected
        assert engine.stats().prefix_hits > 3 * LONG // 2, "the prompts were shared"
    finally:
        executor.close()
