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
from shardline.planner.auto import INPUT_LEN, OUTPUT_LEN, RUNNING, path_here, plan_here
from shardline.planner.layout import STARTED_AXES, Layout

_WARM_LEN = 8


def measure(model: RandomModel, layout: Layout) -> float:
    """The most tokens per second of some rounds."""
    sizes = {f"{axis}_parallel_size": getattr(layout, axis) for axis in STARTED_AXES}
    sizes["enable_expert_parallel"] = layout.whole_experts
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
        plan = plan_here(EngineConfig.from_options(**model.options))
        print(f"{model.name}: {path_here(plan)[0]}")
        speeds = []
        for option in plan.options:
            if option.speed is None:
                continue
            speeds.append(measure(model, option.layout))
            print(
                f"  {option.layout!s:12} predicted {option.speed.output_tok_s.p50:7.0f} tok/s, measured "
                f"{speeds[-1]:7.0f}",
                flush=True,
            )
        print(f"  chosen / fastest: {speeds[0] / max(speeds):.2f}", flush=True)


if __name__ == "__main__":
    main()
