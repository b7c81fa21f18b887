"""Evicted prefixes outlive a restart of real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline import LLM, SamplingParams
from shardline.api.prompts import TokensPrompt
from shardline.messages.stats import TierStats

PROMPTS: list[TokensPrompt] = [{"prompt_token_ids": [(7 * i * j + j) % 200 + 5 for j in range(150)]} for i in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def start(folder: Path) -> LLM:
    """Two ranks, and a pool that holds two of the prompts."""
    tier: dict[str, Any] = {"kv_offloading_size": 0.05, "kv_offloading_dir": str(folder)}
    return LLM("demo", tensor_parallel_size=2, cpu_threads=1, max_model_len=256, num_gpu_blocks_override=12, **tier)


def answers(llm: LLM) -> tuple[list[list[int]], TierStats | None]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    (stats,) = llm.stats()
    return [list(output.outputs[0].token_ids) for output in outputs], stats.tier


@pytest.mark.usefixtures("forked_engines")
def test_evicted_prefixes_outlive_a_restart(tmp_path: Path) -> None:
    """The second engine finds what the first one has evicted, and gives the answers that the first one computed."""
    with start(tmp_path) as llm:
        expected, _ = answers(llm)
    with start(tmp_path) as llm:
        found, tier = answers(llm)
    assert found == expected
    assert tier is not None
    assert tier.copies.read_bytes > 0
    assert tier.hits > 300
    assert (tier.copies.corrupt_blocks, tier.copies.file_errors) == (0, 0)
