"""Whole models on plain torch operations: against transformers, and one answer in every layout."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardline.messages.request import Request
from tests.exactness.cases import CONTEXT_FAMILIES
from tests.exactness.harness import Answer, make_long_requests, make_requests, run, start_engine
from tests.exactness.stored import STORED
from tests.exactness.test_context_parallel import make_long_checkpoint
from tests.models.checkpoints import FAMILIES, VARIANTS, has_experts, make_checkpoint, make_variant
from tests.runtime.test_against_transformers import check

DTYPES = ("float32", "bfloat16")
FORMATS = [name for name, stored in STORED.items() if stored.quantization in (None, "none")]
"""Packed checkpoints, which become dense; other formats need the CPU's own kernels."""
SAMPLED_FORMATS = ("gguf-q4_k_m", "gptq-act-order", "mxfp4")
DENSE_LAYOUTS = {"tp2": {"tensor": 2}, "pp2": {"pipeline": 2}}
EXPERT_LAYOUTS = {
    "tp2-pp2": {"tensor": 2, "pipeline": 2},
    "dp2-ep": {"lockstep": 2, "enable_expert_parallel": True},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--full-matrix")
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", VARIANTS if every else FAMILIES)
    if "stored" in metafunc.fixturenames:
        metafunc.parametrize("stored", FORMATS if every else SAMPLED_FORMATS)
    if "family" in metafunc.fixturenames:
        sampled = [("llama", "bfloat16"), ("mixtral", "float32")]
        metafunc.parametrize(("family", "dtype"), list(product(FAMILIES, DTYPES)) if every else sampled)
    if "context_family" in metafunc.fixturenames:
        every_kind = product(CONTEXT_FAMILIES, DTYPES, ("auto", "int8", "fp8"))
        kinds = list(every_kind) if every else [("llama", "bfloat16", "auto")]
        metafunc.parametrize(("context_family", "dtype", "kv"), kinds)


def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    check(make_variant(variant, tmp_path / "model"), VARIANTS[variant].prompt_len, kernels="torch")


def answers(model: Path, requests: list[Request], batch: str, dtype: str, **options: Any) -> dict[str, Answer]:
    engine, executor = start_engine(model, dtype=dtype, kernels="torch", **options)
    try:
        return run(engine, requests, batch)
    finally:
        engine.close()
        executor.close()


def test_one_answer(family: str, dtype: str, tmp_path: Path) -> None:
    """Tokens and digests of logits are those of one request after another on one rank."""
    model, requests = make_checkpoint(family, tmp_path / "model"), make_requests(256, 4)
    expected = answers(model, requests, "alone", dtype, enable_prefix_caching=False)
    for name, layout in (EXPERT_LAYOUTS if has_experts(family) else DENSE_LAYOUTS).items():
        found = answers(model, requests, "staggered", dtype, max_num_batched_tokens=32, **layout)
        assert found == expected, name


def test_one_answer_of_ranks_that_share_keys(context_family: str, dtype: str, kv: str, tmp_path: Path) -> None:
    """One request has three splits of keys."""
    model = make_long_checkpoint(context_family, tmp_path / "model")
    requests = make_long_requests(256, (8, 1290))
    options: dict[str, Any] = {"kv_cache_dtype": kv, "max_num_batched_tokens": 600}
    expected = answers(model, requests, "alone", dtype, enable_prefix_caching=False, kv_cache_dtype=kv)
    assert answers(model, requests, "staggered", dtype, context=2, **options) == expected


def test_packed_checkpoints_run(stored: str, tmp_path: Path) -> None:
    model, requests = STORED[stored].make(tmp_path), make_requests(256, 2)
    one, two = (answers(model, requests, "together", "bfloat16", tensor=tensor) for tensor in (1, 2))
    assert one == two
