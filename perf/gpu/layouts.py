"""Several ranks share one GPU over gloo. Every layout must give exactly the tokens of a single rank."""

from __future__ import annotations

from typing import Any

from .checks import attempt
from .families import random_model, tokens_of

LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "demo": [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 3},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ],
    "mixtral": [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"data_parallel_size": 2, "enable_expert_parallel": True},
    ],
    "deepseek_v3": [{"tensor_parallel_size": 2, "enable_expert_parallel": True}],
}
"""Layouts by model. A single rank replays CUDA graphs and these layouts do not, so this compares graphs too."""


def same_tokens(model: str, device: str, layouts: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare greedy tokens in bf16, in a batch and alone."""
    options = {"device": device, "dtype": "bfloat16", "max_num_seqs": 16, "kv_cache_memory": "256MiB"}
    expected = tokens_of(model, **options)
    result: dict[str, Any] = {}
    for layout in layouts:
        name = " ".join(f"{key}={value}" for key, value in layout.items())
        tokens = attempt(lambda chosen: tokens_of(model, **options, **chosen, collectives="gloo"), layout)
        result[name] = tokens if isinstance(tokens, str) else {"ok": tokens == expected}
    return result


def run(device: str) -> dict[str, Any]:
    """Run all layouts."""
    result = {}
    for model, layouts in LAYOUTS.items():
        if model == "demo":
            result[model] = attempt(same_tokens, model, device, layouts)
            continue
        with random_model(model) as folder:
            result[model] = attempt(same_tokens, folder, device, layouts)
    return result
