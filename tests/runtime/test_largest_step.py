"""The step that a rank runs to see what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.config.engine import EngineConfig
from shardline.deployment.here import resolve_here
from shardline.runtime.worker import largest_step
from tests.models.checkpoints import make_checkpoint


@pytest.mark.parametrize(("tokens", "seqs", "length"), [(64, 6, 32), (8, 30, 32), (500, 3, 32)])
def test_the_largest_step_is_the_largest_plan(tokens: int, seqs: int, length: int, tmp_path: Path) -> None:
    options = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs, "max_model_len": length}
    model = make_checkpoint("gemma3_text", tmp_path)
    setup = resolve_here(EngineConfig.from_options(model=str(model), device="cpu", **options))
    step = largest_step(setup)
    assert step.plan.num_tokens == min(tokens, seqs * length) == step.replica_tokens[0]
    assert step.plan.num_samples == min(seqs, tokens) == len(step.plan.starts)
    assert all(start.sampling.frequency_penalty and start.sampling.logprobs for start in step.plan.starts)
    assert max(entry.num_tokens for entry in step.plan.steps) <= length
    for entry in step.plan.steps:
        assert len(entry.new_blocks) == len(setup.cache.groups)
        assert all(
            len(blocks) * setup.cache.block_size >= entry.num_tokens and not any(blocks) for blocks in entry.new_blocks
        )
