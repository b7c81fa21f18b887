"""Is the layout that `--parallel auto` chooses the fastest on this CPU? `python perf/parallel_auto.py`.

The script runs every layout that `--parallel auto` considers, with the load for which it chooses, on models with random
weights: a dense one, and one with experts. It prints the tokens per second that were predicted and measured, and the
measured speed of the chosen layout divided by that of the fastest. Aim: at least 0.9.
"""

from __future__ import annotations

import time

from random_models import RandomModel, asked_models

from shardline import LLM, SamplingParams
from shardline.config.engine import EngineConfig
from shardline.planner.auto import INPUT_LEN, OUTPUT_LEN, RUNNING, Candidate, choose_parallel

_WARM_LEN = 8


def measure(model: RandomModel, candidate: Candidate) -> float:
    """The most tokens per second of some rounds."""
    one = candidate.parallel
    sizes = {
        "tensor_parallel_size": one.tensor_parallel_size,
        "pipeline_parallel_size": one.pipeline_parallel_size,
        "data_parallel_size": one.data_parallel_size,
        "enable_expert_parallel": one.enable_expert_parallel,
    }
    best = 0.0
    with LLM(**model.options, **sizes) as llm:
        for output_len in (_WARM_LEN, *[OUTPUT_LEN] * model.rounds):
            prompts = model.prompts(RUNNING, INPUT_LEN)
            params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
            if output_len == OUTPUT_LEN:
                best = max(best, RUNNING * OUTPUT_LEN / (time.perf_counter() - started))
    return best


def main() -> None:
    """Compare the layouts of each model."""
    for model in asked_models(__doc__, rounds=2):
        choice = choose_parallel(EngineConfig.from_options(**model.options))
        print(f"{model.name}: {choice.path[0]}")
        speeds = []
        for candidate in choice.candidates:
            speeds.append(measure(model, candidate))
            print(
                f"  {candidate!s:12} predicted {candidate.output_tokens_per_second:7.0f} tok/s, measured "
                f"{speeds[-1]:7.0f}",
                flush=True,
            )
        print(f"  chosen / fastest: {speeds[0] / max(speeds):.2f}", flush=True)


if __name__ == "__main__":
    main()
