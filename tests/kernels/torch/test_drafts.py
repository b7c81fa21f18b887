"""Drafts on plain torch operations: heads guess as their papers say, and answers are those without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.runtime.machines.cuda.step_inputs import Uploader
from shardline.runtime.machines.torch.machine import TorchStepInputs
from tests.exactness.cases import DRAFTS, HEAD_DRAFTS, KGW, MODEL_DRAFTS, Case
from tests.exactness.harness import Answer, golden, make_requests, marked
from tests.exactness.test_matrix import check_case
from tests.models.checkpoints import make_checkpoint
from tests.models.heads import Eagle3Reference, Reference, make_eagle, make_eagle3, make_predicting
from tests.runtime.features.test_draft_head import check_guesses

HEADS = ("mimo", "eagle", "eagle3", "deepseek_v3")
"""The suite has the first one; `make exact` all, and more layouts."""
LAYOUTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (DRAFTS, {}),
    (MODEL_DRAFTS, {"tensor": 2}),
    (HEAD_DRAFTS, {"tensor": 2}),
    (DRAFTS, {"mark": KGW}),
    (DRAFTS, {"tensor": 2, "pipeline": 2, "prefill": "chunked", "memory": "tight"}),
    (MODEL_DRAFTS, {"pipeline": 2, "cache": "warm"}),
    (HEAD_DRAFTS, {"pipeline": 2, "data": 2, "batch": "staggered"}),
)
SAMPLED = LAYOUTS[:3]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--full-matrix")
    if "head" in metafunc.fixturenames:
        metafunc.parametrize("head", HEADS if every else HEADS[:1])
    if "kind" in metafunc.fixturenames:
        kinds = [("llama", "bfloat16", "none"), ("qwen3_moe", "float32", "int8"), ("gpt2", "float32", "none")]
        metafunc.parametrize("kind", kinds if every else kinds[:1], ids="-".join)


def test_guesses_of_heads(head: str, tmp_path: Path) -> None:
    if head.startswith("eagle"):
        model, path = make_checkpoint("llama", tmp_path / "model"), tmp_path / "head"
        if head == "eagle":
            check_guesses(Reference(model, make_eagle(path)), model, path, tensor=2, kernels="torch")
        else:
            check_guesses(Eagle3Reference(model, make_eagle3(path), (2, 2, 1)), model, path, 2, 2, kernels="torch")
    else:
        model = make_predicting(head, tmp_path)
        check_guesses(Reference(model), model, None, kernels="torch")


def test_one_answer(
    kind: tuple[str, str, str], tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of drafts of an n-gram, of a draft model and of a head. Those of text take the way of steps to a device."""
    every = pytestconfig.getoption("--full-matrix")
    family, dtype, quantization = kind
    model = make_checkpoint(family, tmp_path / "model", dtype=dtype, max_position_embeddings=2048)
    base = Case(family, dtype, 1, 1, 1, "together", "whole", "off", "roomy", *(quantization, *_REST))
    goldens: dict[str, dict[str, Answer]] = {}
    for drafts, values in LAYOUTS if every else SAMPLED:
        case = base._replace(drafts=drafts, **values)
        requests = marked(make_requests(256, 8 if every else 3), case.mark)
        if case.mark not in goldens:
            goldens[case.mark] = golden(model, dtype, quantization, "auto", requests, case.mark, "torch")
        with monkeypatch.context() as patch:
            if drafts == DRAFTS:
                patch.setattr(TorchStepInputs, "__init__", _uploading)
            check_case(model, case, requests, goldens[case.mark], kernels="torch")


_REST = ("split-experts", "kv-auto", "one-host")


def _uploading(inputs: TorchStepInputs, device: torch.device, *arguments: Any) -> None:
    """Steps are sent in one copy, as to a device with memory of its own."""
    _MAKE(inputs, device, *arguments)
    inputs._uploader = Uploader(device)


_MAKE = TorchStepInputs.__init__
