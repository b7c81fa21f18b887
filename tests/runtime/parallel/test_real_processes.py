"""The exactness matrix with real processes and real sockets, through the public API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline import LLM, SamplingParams
from shardline.api.prompts import TokensPrompt
from tests.exactness.harness import golden, make_requests
from tests.models.checkpoints import make_checkpoint

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2-pp2-dp2": ("qwen3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}),
    "dp2-tp2-ep": (
        "qwen3_moe",
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "dp2-pp2-ep-gloo": (
        "mixtral",
        {
            "pipeline_parallel_size": 2,
            "data_parallel_size": 2,
            "enable_expert_parallel": True,
            "collectives": "gloo",
        },
    ),
    "mla-tp3-pp2": ("deepseek_v3", {"tensor_parallel_size": 3, "pipeline_parallel_size": 2}),
    "mla-tp3-gloo": ("deepseek_v2", {"tensor_parallel_size": 3, "collectives": "gloo"}),
    "ep3-gloo": ("mixtral", {"tensor_parallel_size": 3, "enable_expert_parallel": True, "collectives": "gloo"}),
    "states-tp2-pp2": ("nemotron_h", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "states-dp2-ep": ("qwen3_5_moe_text", {"data_parallel_size": 2, "enable_expert_parallel": True}),
    "torch-tp2-pp2-gloo": (
        "qwen3",
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "collectives": "gloo", "kernels": "torch"},
    ),
    "torch-dp2-ep-gloo": (
        "mixtral",
        {"data_parallel_size": 2, "enable_expert_parallel": True, "collectives": "gloo", "kernels": "torch"},
    ),
}


@pytest.mark.usefixtures("forked_engines")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_answer(layout: str, tmp_path: Path) -> None:
    family, parallel = LAYOUTS[layout]
    model = make_checkpoint(family, tmp_path / family)
    # The offline API numbers the choices of a request itself: each of these has one, number 0.
    requests = [msgspec.structs.replace(request, choice=0, eos_token_ids=()) for request in make_requests(256)]
    expected = golden(model, "bfloat16", "none", "auto", requests, kernels=parallel.get("kernels", "auto"))
    options = {"max_num_batched_tokens": 32, "dtype": "bfloat16", **parallel}
    with LLM(str(model), **options) as llm:
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=request.prompt_token_ids) for request in requests],
            [msgspec.structs.replace(request.sampling, ignore_eos=True) for request in requests],
            use_tqdm=False,
        )
        assert len(llm.stats()) == parallel.get("data_parallel_size", 1)
        loads = [stats.experts for stats in llm.stats() if stats.experts is not None]
        # Replicas in lockstep share their experts. Every expert is somebody's, and every rank has work to do.
        assert len(loads) == (
            0 if family == "qwen3" else 1 if parallel.get("enable_expert_parallel") else len(llm.stats())
        )
        assert all(all(load.rank_tokens) for load in loads)
        assert all(stats.num_steps > 0 and stats.kv_blocks_used == 0 for stats in llm.stats())
    for request, output in zip(requests, outputs, strict=True):
        answer = expected[request.request_id]
        assert output.outputs[0].token_ids == answer.token_ids
        assert output.outputs[0].digests == answer.digests


@pytest.mark.usefixtures("forked_engines")
def test_fast_numerics_answer_alike() -> None:
    """Partial sums across ranks change last bits, not what a confident model says in float32."""
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    with LLM("demo", dtype="float32", tensor_parallel_size=2, numerics="fast") as llm:
        [output] = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)
    assert output.outputs[0].text == (
        "Join two or more pathname components, inserting '/' as needed. If any component is an absolute path, all "
        "previous path components will be discarded."
    )
