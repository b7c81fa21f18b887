"""Adapters on plain torch operations: against merged weights, and one answer in every batch and layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.exactness.test_adapters import Setup
from tests.runtime.test_adapters import CASES, check_logits

SAMPLED = ("fused", "embedding and head", "dora of a tied head", "shared expert")
"""Cases of the suite; `make exact` runs all, and all kinds of weights."""
KINDS = (
    ("bfloat16", "none", "qwen2"),
    ("bfloat16", "fp8", "llama"),
    ("float32", "int4_fast", "llama"),
    ("bfloat16", "int8", "qwen3_moe"),
)
"""Models that are small enough; the first one has biases."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--full-matrix")
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES if every else SAMPLED)
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", KINDS if every else KINDS[:1], ids="-".join)


def test_logits_are_those_of_merged_weights(case: str, tmp_path: Path) -> None:
    check_logits(case, tmp_path, kernels="torch")


def test_one_answer(kind: tuple[str, str, str], tmp_path: Path, pytestconfig: pytest.Config) -> None:
    every = pytestconfig.getoption("--full-matrix")
    setup = Setup(tmp_path, *kind, kernels="torch", count=8 if every else 4)
    layouts: list[dict[str, Any]] = [{"tensor": 2, "max_num_batched_tokens": 32}]
    if every:
        layouts += [{}, {"tensor": 2, "pipeline": 2, "max_num_batched_tokens": 13}]
        if kind[2] == "qwen3_moe":
            layouts.append({"tensor": 2, "enable_expert_parallel": True})
    for layout in layouts:
        assert setup.answers(setup.requests, "together", **layout) == setup.expected, layout
    plain = [request for request in setup.requests if request.adapter is None]
    answers = setup.answers(plain, "together", enable_lora=False)
    assert answers == {request.request_id: setup.expected[request.request_id] for request in plain}
