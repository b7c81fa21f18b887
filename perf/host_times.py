"""The planner's step times on this CPU against the engine's: `python perf/host_times.py`.

In each round the host is measured as `shardline plan --gpus here` does, and the engine then computes prompts and
decodes, with one request and with several that start together, on models with random weights. The script prints the
predicted time of the prompts and of a decode step, divided by the measured one. Aim: 0.85 to 1.2.
"""

from __future__ import annotations

import statistics
import time

from random_models import RandomModel, asked_models

from shardline import LLM, SamplingParams
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment
from shardline.deployment.here import resolve_here
from shardline.planner.auto import HOST_TIMING, cpu_cluster
from shardline.planner.speed import deployment_work
from shardline.planner.timing import Load, loop_steps

INPUT_LEN, OUTPUT_LEN = 256, 48
RUNNING = (1, 8)


def predict(deployment: Deployment, running: int) -> tuple[float, float]:
    """(seconds of the prompts, seconds of a decode step), with a new measurement of the host."""
    cluster = cpu_cluster(deployment.machine, 1).part(1)
    chunk = deployment.limits.max_num_batched_tokens
    load = Load(running, INPUT_LEN, OUTPUT_LEN, chunk, in_phase=True)
    steps = loop_steps(deployment_work(deployment), cluster, load, 1)
    constants = HOST_TIMING.constants
    return steps.bursts * steps.burst.seconds(constants), steps.decode.seconds(constants)


def measure(llm: LLM, model: RandomModel, running: int) -> tuple[float, float]:
    """The same of the engine."""
    seconds = []
    for output_len in (1, OUTPUT_LEN):
        prompts = model.prompts(running, INPUT_LEN)
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - started)
    return seconds[0], (seconds[1] - seconds[0]) / (OUTPUT_LEN - 1)


def main() -> None:
    """Compare each model."""
    for model in asked_models(__doc__, rounds=5):
        deployment = resolve_here(EngineConfig.from_options(**model.options))
        pairs: dict[tuple[int, str], list[tuple[float, float]]] = {}
        with LLM(**model.options) as llm:
            measure(llm, model, RUNNING[-1])
            for _ in range(model.rounds):
                for running in RUNNING:
                    times = zip(predict(deployment, running), measure(llm, model, running), strict=True)
                    for what, pair in zip(("prompts", "decode step"), times, strict=True):
                        pairs.setdefault((running, what), []).append(pair)
        for (running, what), found in pairs.items():
            ratios = sorted(predicted / measured for predicted, measured in found)
            median = statistics.median(measured for _, measured in found)
            print(
                f"{model.name}, {running} running, {what}: measured {1e3 * median:.1f} ms, "
                f"predicted / measured {statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}]",
                flush=True,
            )


if __name__ == "__main__":
    main()
