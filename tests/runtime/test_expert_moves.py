"""Experts move between ranks while requests run: every bit stays, and ranks have as much to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardline.engine import expert_balance, expert_balancer
from shardline.runtime.layers.moe import MoEFeedForward
from tests.exactness.harness import drafts_allowed, golden, make_requests, run, start_engine
from tests.models.checkpoints import make_checkpoint

EXPERTS = 6


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A router that prefers the first experts, which one rank has."""
    model = make_checkpoint("mixtral", tmp_path_factory.mktemp("skewed") / "mixtral", num_local_experts=EXPERTS)
    weights = load_file(model / "model.safetensors")
    for key, weight in weights.items():
        if key.endswith("block_sparse_moe.gate.weight"):
            weights[key] = torch.zeros_like(weight)
            weights[key][2:4] = 0.02 * weight[2:4]  # experts 2 and 3 are sometimes better than 0 and 1
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens are enough to move experts, and nothing is waited for."""
    monkeypatch.setattr(expert_balance, "_CHANCE", 0.0)
    monkeypatch.setattr(expert_balancer, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(expert_balancer, "_SHARE", 1e9)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("tensor", "pipeline", "lockstep", "quantization", "redundant", "drafts"),
    [
        (2, 1, 1, "none", 0, False),
        (2, 1, 1, "none", 0, True),
        (2, 1, 2, "int8", 2, False),
        (2, 2, 1, "int4", 1, False),
        (1, 1, 3, "none", 3, False),
    ],
)
def test_requests_keep_their_bits_while_experts_move(
    skewed: Path,
    tensor: int,
    pipeline: int,
    lockstep: int,
    quantization: str,
    redundant: int,
    drafts: bool,
    tmp_path: Path,
) -> None:
    requests = make_requests(256, count=6)
    expected = golden(skewed, "bfloat16", quantization, "auto", requests)
    options: dict[str, Any] = {}
    if drafts:
        draft = make_checkpoint("qwen2", tmp_path, max_position_embeddings=2048)
        options["speculative_config"] = {"model": str(draft), "num_speculative_tokens": 2}
    with drafts_allowed():
        engine, executor = start_engine(
            skewed,
            tensor=tensor,
            pipeline=pipeline,
            lockstep=lockstep,
            dtype="bfloat16",
            quantization=quantization,
            enable_expert_parallel=True,
            enable_eplb=True,
            eplb_config=f'{{"step_interval": 4, "num_redundant_experts": {redundant}}}',
            enable_prefix_caching=False,
            **options,
        )
        try:
            answers = run(engine, requests, "together")
            again = run(engine, requests, "together")
            stats = engine.stats()
        finally:
            engine.close()
            executor.close()
    assert (stats.drafts is not None and stats.drafts.num_tokens > 0) == drafts
    assert answers == expected
    assert again == expected
    assert stats.experts is not None
    moves = stats.experts.moves
    assert moves is not None
    assert moves.count > 0
    if not redundant:  # copies lie well from the start
        assert moves.imbalance < moves.unmoved_imbalance


@pytest.mark.usefixtures("eager")
def test_experts_that_cannot_be_read_stay_where_they_are(skewed: Path, caplog: pytest.LogCaptureFixture) -> None:
    requests = make_requests(256, count=4)
    expected = golden(skewed, "bfloat16", "none", "auto", requests)
    engine, executor = start_engine(
        skewed,
        tensor=2,
        dtype="bfloat16",
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config='{"step_interval": 4, "log_balancedness": true}',
        enable_prefix_caching=False,
    )
    try:
        with (
            patch.object(MoEFeedForward, "read_experts", side_effect=OSError("the disk is gone")),
            caplog.at_level("INFO"),
        ):
            answers = run(engine, requests, "together")
        stats = engine.stats()
    finally:
        engine.close()
        executor.close()
    assert answers == expected
    assert "experts stay where they are: the disk is gone" in caplog.text
    assert "times the mean load" in caplog.text
    assert stats.experts is not None
    assert stats.experts.moves is not None
    assert stats.experts.moves.count == 0
