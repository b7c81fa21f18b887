"""Is the layout that `--parallel auto` chooses the fastest on this CPU? `python benchmarks/parallel_auto.py`.

The script runs every layout that `--parallel auto` considers, with the load for which it chooses, on models with random
weights: a dense one, and one with experts. It prints the tokens per second that were predicted and measured, and the
measured speed of the chosen layout divided by that of the fastest. Aim: at least 0.9.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from shardline import LLM, SamplingParams
from shardline.config.engine import EngineConfig
from shardline.planner.auto import INPUT_LEN, OUTPUT_LEN, RUNNING, Candidate, choose_parallel
from shardline.planner.catalog import shipped_facts

MODELS = {
    "dense": ("Qwen/Qwen3-0.6B", {"num_hidden_layers": 8, "vocab_size": 32000}),
    "experts": (
        "Qwen/Qwen3-30B-A3B",
        {
            "num_hidden_layers": 6,
            "vocab_size": 32000,
            "hidden_size": 1024,
            "num_experts": 16,
            "num_attention_heads": 16,
        },
    ),
}
_WARM_LEN = 8


def options(model: str) -> dict[str, Any]:
    """Those of all layouts."""
    return {
        "model": model,
        "device": "cpu",
        "load_format": "dummy",
        "max_model_len": 1024,
        "kv_cache_memory": "1GiB",
        "enable_prefix_caching": False,
    }


def measure(model: str, candidate: Candidate, rounds: int, dice: random.Random) -> float:
    """The most tokens per second of some rounds."""
    one = candidate.parallel
    sizes = {
        "tensor_parallel_size": one.tensor_parallel_size,
        "pipeline_parallel_size": one.pipeline_parallel_size,
        "data_parallel_size": one.data_parallel_size,
        "enable_expert_parallel": one.enable_expert_parallel,
    }
    best = 0.0
    with LLM(**options(model), **sizes) as llm:
        for output_len in (_WARM_LEN, *[OUTPUT_LEN] * rounds):
            prompts = [
                {"prompt_token_ids": [dice.randrange(10, 30000) for _ in range(INPUT_LEN)]} for _ in range(RUNNING)
            ]
            params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
            if output_len == OUTPUT_LEN:
                best = max(best, RUNNING * OUTPUT_LEN / (time.perf_counter() - started))
    return best


def main() -> None:
    """Compare the layouts of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="only these (default: all)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each layout (default: 2)")
    arguments = parser.parse_args()
    dice = random.Random(0)
    for name in arguments.models or MODELS:
        source, changes = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            config = dict(shipped_facts()["models"][source]["config"], **changes)
            (Path(folder) / "config.json").write_text(json.dumps(config))
            choice = choose_parallel(EngineConfig.from_options(**options(folder)))
            print(f"{name}: {choice.path[0]}")
            speeds = []
            for candidate in choice.candidates:
                speeds.append(measure(folder, candidate, arguments.rounds, dice))
                print(
                    f"  {candidate!s:12} predicted {candidate.output_tokens_per_second:7.0f} tok/s, measured "
                    f"{speeds[-1]:7.0f}",
                    flush=True,
                )
            print(f"  chosen / fastest: {speeds[0] / max(speeds):.2f}", flush=True)


if __name__ == "__main__":
    main()
