"""Models of which Triton's kernels lack a part: torch computes these ops, and the logits are the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardline.deployment.deployment import KernelFallback
from shardline.deployment.gpu_support import GRAPHS, lacking_kernels
from shardline.kernels.cuda.proof.trials import OPS
from shardline.runtime.machines.cuda.step_inputs import Uploader
from shardline.runtime.machines.host.machine import HostBackend
from shardline.runtime.worker import Worker
from tests.kernels.cuda.helpers import CPU
from tests.kernels.cuda.test_model import PROMPT, load, step_of
from tests.kernels.cuda.test_proof_process import ProvingBackend
from tests.models.checkpoints import make_checkpoint

LACKS = {
    "gpt_oss": {"attention", "experts"},
    "llama4_text": {"attention", "scale_rows"},
    "gemma4_text": {"scale_rows", GRAPHS},
    "cohere2": {"scale_rows"},
    "granite": {"scale_rows"},
    "ministral3": {"scale_rows"},
    "mistral4": {"scale_rows"},
}
SAMPLED = ("gpt_oss", "gemma4_text", "cohere2")
SMALLER: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "llama4_text": {},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", LACKS if metafunc.config.getoption("--full-matrix") else SAMPLED)


@torch.inference_mode()
def logits(worker: Worker) -> list[Tensor]:
    """Of a prompt in two chunks, which are longer than a window, then of a decode step."""
    stage, groups = worker.stage, len(worker._deployment.cache.groups)
    results = []
    for tokens, start in ((PROMPT[:9], 0), (PROMPT[9:12], 9), ([40], 12)):
        step = Uploader(CPU).upload(step_of(tokens, start, groups))
        hidden = stage.embed(step)
        results.append(stage.forward(stage.add_inputs(step, hidden), hidden))
    return results


def test_logits_are_the_cpus(tmp_path: Path, family: str) -> None:
    make_checkpoint(family, tmp_path, **SMALLER.get(family, {"num_hidden_layers": 2}))
    expected = logits(load(tmp_path, {"max_model_len": 32}, HostBackend()))
    backend = ProvingBackend()
    worker = load(tmp_path, {"max_model_len": 32}, backend)
    deployment = worker._deployment
    assert {fallback.kernel for fallback in backend._fallbacks} == LACKS[family]
    assert backend._fallbacks == tuple(KernelFallback(*lack) for lack in lacking_kernels(deployment.spec).items())
    replaced = backend.kernels.replaced & {op for kernel in OPS for op in OPS[kernel] if kernel in LACKS[family]}
    assert replaced == {op for kernel in LACKS[family] for op in OPS.get(kernel, ())}
    for ours, theirs in zip(logits(worker), expected, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
        assert torch.equal(ours.argmax(1), theirs.argmax(1))
