"""Whole models on plain torch operations: against transformers, and one answer in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.messages.request import Request
from tests.exactness.harness import Answer, make_requests, run, start_engine
from tests.models.checkpoints import VARIANTS, has_experts, make_checkpoint, make_variant
from tests.runtime.test_against_transformers import check

SAMPLED = ("llama", "gpt2", "gemma2", "deepseek_v3", "gpt_oss")
"""Variants of the suite; `make exact` runs all."""
LAYOUTS = {
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "tp2-ep": {"tensor": 2, "enable_expert_parallel": True},
    "dp2-ep": {"lockstep": 2, "enable_expert_parallel": True},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", VARIANTS if metafunc.config.getoption("--full-matrix") else SAMPLED)


def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    check(make_variant(variant, tmp_path / "model"), VARIANTS[variant].prompt_len, kernels="torch")


def answers(model: Path, requests: list[Request], batch: str, dtype: str, **options: object) -> dict[str, Answer]:
    engine, executor = start_engine(model, dtype=dtype, kernels="torch", **options)
    try:
        return run(engine, requests, batch)
    finally:
        engine.close()
        executor.close()


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("mixtral", "float32")])
def test_one_answer(family: str, dtype: str, tmp_path: Path) -> None:
    """Tokens and digests of logits are those of one request after another on one rank."""
    model, requests = make_checkpoint(family, tmp_path / "model"), make_requests(256, 4)
    expected = answers(model, requests, "alone", dtype, enable_prefix_caching=False)
    for name, layout in LAYOUTS.items():
        if has_experts(family) or not name.endswith("-ep"):
            found = answers(model, requests, "staggered", dtype, max_num_batched_tokens=32, **layout)
            assert found == expected, name
