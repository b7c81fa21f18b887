"""Experts split over ranks or whole on them: bytes held, load counted, routings that are out of balance."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.engine.executor import make_executor
from shardline.models.sizes import weight_bytes
from tests.exactness.harness import golden, make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint

SCHEMES = ("none", "int8", "int4")
# Every layout with every scheme; half of each with whole experts.
LAYOUTS = [
    (tensor, pipeline, scheme, (place + number) % 2 == 1)
    for place, (tensor, pipeline) in enumerate([(1, 1), (2, 1), (3, 2)])
    for number, scheme in enumerate(SCHEMES)
]


@pytest.mark.parametrize(("tensor", "pipeline", "quantization", "whole"), LAYOUTS)
def test_reported_bytes_are_those_of_the_formula(
    tensor: int, pipeline: int, quantization: str, whole: bool, tmp_path: Path
) -> None:
    config = {
        "model_type": "qwen2_moe",
        "vocab_size": 3072,
        "hidden_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "num_experts": 21,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "shared_expert_intermediate_size": 768,
        "intermediate_size": 768,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "num_gpu_blocks_override": 64,
        "cpu_threads": 1,
        "distributed_executor_backend": "threads",
    }
    setup = resolve_here(
        EngineConfig.from_options(
            model=str(tmp_path),
            quantization=quantization,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            enable_expert_parallel=whole,
            **options,
        )
    )
    executor = make_executor(setup)
    try:
        for report in executor.start():
            place = setup.grid.place(report.rank)
            expected = weight_bytes(
                setup.spec, place, setup.stages, "bfloat16", "exact", setup.weight_format, expert_parallel=whole
            )
            assert report.weight_bytes == pytest.approx(expected, rel=0.02)
    finally:
        executor.close()


@pytest.mark.parametrize("whole", [False, True], ids=["split", "whole"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2)])
def test_every_token_may_choose_the_same_experts(tensor: int, pipeline: int, whole: bool, tmp_path: Path) -> None:
    """A router that prefers experts 0 and 1, both on the same rank, whatever the token."""
    model = make_checkpoint("mixtral", tmp_path / "mixtral", num_local_experts=5)
    weights = load_file(model / "model.safetensors")
    for key, weight in weights.items():
        if key.endswith("block_sparse_moe.gate.weight"):
            # All scores are equal then, and ties go to the lowest ids.
            weights[key] = torch.zeros_like(weight)
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    requests = make_requests(256, count=4)
    expected = golden(model, "bfloat16", "none", "auto", requests)
    options: dict[str, Any] = {"dtype": "bfloat16", "enable_expert_parallel": whole, "enable_prefix_caching": False}
    engine, executor = start_engine(model, tensor=tensor, pipeline=pipeline, **options)
    try:
        answers = run(engine, requests, "together")
        stats = engine.stats()
    finally:
        executor.close()
    assert answers == expected
    load = stats.experts
    assert load is not None
    # The last token of a request is not computed. The last of the 4 layers has only tokens that are sampled.
    generated = sum(len(answer.token_ids) for answer in answers.values())
    computed = sum(len(r.prompt_token_ids) - 1 for r in requests) + generated
    assert load.expert_tokens[0] == load.expert_tokens[1] == 3 * computed + generated
    assert load.expert_tokens[2:] == [0, 0, 0]
    assert load.expert_imbalance == pytest.approx(2.5)
    stages = [3 * computed + generated] if pipeline == 1 else [2 * computed, computed + generated]
    idle = whole and tensor == 2
    of_ranks = [[2 * tokens, *[0 if idle else 2 * tokens] * (tensor - 1)] for tokens in stages]
    assert load.rank_tokens == list(itertools.chain(*of_ranks))
    assert load.rank_imbalance == pytest.approx(2.0 if idle else 1.0)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("whole", [False, True], ids=["split", "whole"])
def test_fast_numerics_answer_alike(family: str, whole: bool, tmp_path: Path) -> None:
    """Partial sums across ranks change last bits only: in float32, most greedy tokens stay."""
    model = make_checkpoint(family, tmp_path / family)
    requests = [request for request in make_requests(256) if request.sampling.temperature == 0.0]
    expected = golden(model, "float32", "none", "auto", requests)
    engine, executor = start_engine(model, tensor=3, dtype="float32", numerics="fast", enable_expert_parallel=whole)
    try:
        answers = run(engine, requests, "together")
    finally:
        executor.close()
    assert [answer.digests for answer in answers.values()] != [answer.digests for answer in expected.values()]
    for request_id, answer in answers.items():
        assert answer.token_ids == expected[request_id].token_ids
