"""Requests with states: the memory of a state serves one request after another, and requests that are cut short or
computed anew leave nothing in it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from shardline import LLM
from tests.exactness.harness import Answer, golden, make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint

COUNT = 14


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_5_text", tmp_path_factory.mktemp("states") / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, Answer]:
    return golden(model, "bfloat16", "none", "auto", make_requests(256, COUNT))


@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        ({"max_num_seqs": 2}, False),
        ({"max_num_seqs": 5, "num_gpu_blocks_override": 9}, True),
        ({"max_num_seqs": 5, "num_gpu_blocks_override": 9, "pipeline": 2}, True),
        ({"max_num_seqs": 5, "num_gpu_blocks_override": 9, "tensor": 2, "kernels": "torch"}, True),
        ({"lockstep": 2, "max_num_seqs": 3}, False),
    ],
    ids=str,
)
def test_few_states_serve_many_requests(
    model: Path, expected: dict[str, Answer], options: dict[str, Any], preempts: bool
) -> None:
    requests = make_requests(256, COUNT)
    if options.get("kernels") == "torch":
        expected = golden(model, "bfloat16", "none", "auto", requests, kernels="torch")
    engine, executor = start_engine(model, dtype="bfloat16", max_model_len=128, max_num_batched_tokens=24, **options)
    try:
        assert run(engine, requests, "staggered") == expected
        assert (engine.stats().num_preemptions > 0) == preempts
    finally:
        engine.close()
        executor.close()


def test_the_front_knows_that_no_prefix_is_cached(model: Path) -> None:
    with LLM(model=str(model), skip_tokenizer_init=True, max_model_len=128, cpu_threads=1) as llm:
        assert not llm.config.cache.enable_prefix_caching


def test_requests_that_are_cut_short_leave_nothing(model: Path, expected: dict[str, Answer]) -> None:
    requests, rng = make_requests(256, COUNT), random.Random(5)
    engine, executor = start_engine(
        model, dtype="bfloat16", max_num_seqs=3, max_num_batched_tokens=24, max_model_len=128
    )
    try:
        for request in requests:
            engine.add_request(request)
        for _ in range(12):
            engine.step()
            engine.abort_requests([rng.choice(requests).request_id])
        engine.abort_requests([request.request_id for request in requests])
        while engine.busy:
            engine.step()
        assert run(engine, requests, "together") == expected
    finally:
        engine.close()
        executor.close()
