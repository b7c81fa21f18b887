"""Several ranks, which share one GPU over gloo. Every layout must give exactly the tokens of a single rank."""

from __future__ import annotations

from typing import Any

from .families import random_model, tokens_of
from .inputs import attempt

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


def same_tokens(model: str, on: dict[str, str], layouts: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare greedy tokens in bf16, in a batch and alone."""
    options = {**on, "dtype": "bfloat16", "max_num_seqs": 16, "kv_cache_memory": "256MiB", "max_model_len": 512}
    gloo = {} if on["device"] == "cpu" else {"collectives": "gloo"}
    expected = tokens_of(model, **options)
    result: dict[str, Any] = {}
    for layout in layouts:
        name = " ".join(f"{key}={value}" for key, value in layout.items())
        tokens = attempt(lambda chosen: tokens_of(model, **options, **chosen, **gloo), layout)
        result[name] = tokens if isinstance(tokens, str) else {"ok": tokens == expected}
    return result


def run(on: dict[str, str]) -> dict[str, Any]:
    """Run all layouts."""
    result = {}
    for model, layouts in LAYOUTS.items():
        if model == "demo":
            result[model] = attempt(same_tokens, model, on, layouts)
            continue
        with random_model(model) as folder:
            result[model] = attempt(same_tokens, folder, on, layouts)
    return result
