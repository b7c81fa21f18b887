"""The planner's step times on this CPU against the engine's: `python benchmarks/host_times.py`.

In each round the host is measured as `shardline plan --gpus here` does, and the engine then computes prompts and
decodes, with one request and with several that start together, on models with random weights. The script prints the
predicted time of the prompts and of a decode step, divided by the measured one. Aim: 0.85 to 1.2.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from parallel_auto import MODELS, options

from shardline import LLM, SamplingParams
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment
from shardline.deployment.here import resolve_here
from shardline.planner.auto import deployment_work
from shardline.planner.catalog import shipped_facts
from shardline.planner.host import HOST_TIMING, measure_host, share_host
from shardline.planner.timing import Load, loop_steps

INPUT_LEN, OUTPUT_LEN = 256, 48
RUNNING = (1, 8)


def predict(deployment: Deployment, running: int) -> tuple[float, float]:
    """(seconds of the prompts, seconds of a decode step), with a new measurement of the host."""
    cluster = share_host(measure_host(deployment.machine), 1)
    chunk = deployment.limits.max_num_batched_tokens
    load = Load(running, INPUT_LEN, OUTPUT_LEN, chunk, in_phase=True)
    steps = loop_steps(deployment_work(deployment), cluster, load, 1)
    constants = HOST_TIMING.constants
    return steps.bursts * steps.burst.seconds(constants), steps.decode.seconds(constants)


def measure(llm: LLM, running: int, dice: random.Random) -> tuple[float, float]:
    """The same of the engine."""
    seconds = []
    for output_len in (1, OUTPUT_LEN):
        prompts = [{"prompt_token_ids": [dice.randrange(10, 30000) for _ in range(INPUT_LEN)]} for _ in range(running)]
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - started)
    return seconds[0], (seconds[1] - seconds[0]) / (OUTPUT_LEN - 1)


def main() -> None:
    """Compare each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="only these (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: 5)")
    arguments = parser.parse_args()
    dice = random.Random(0)
    for name in arguments.models or MODELS:
        source, changes = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            config = dict(shipped_facts()["models"][source]["config"], **changes)
            (Path(folder) / "config.json").write_text(json.dumps(config))
            deployment = resolve_here(EngineConfig.from_options(**options(folder)))
            pairs: dict[tuple[int, str], list[tuple[float, float]]] = {}
            with LLM(**options(folder)) as llm:
                measure(llm, RUNNING[-1], dice)
                for _ in range(arguments.rounds):
                    for running in RUNNING:
                        times = zip(predict(deployment, running), measure(llm, running, dice), strict=True)
                        for what, pair in zip(("prompts", "decode step"), times, strict=True):
                            pairs.setdefault((running, what), []).append(pair)
        for (running, what), found in pairs.items():
            ratios = sorted(predicted / measured for predicted, measured in found)
            median = statistics.median(measured for _, measured in found)
            print(
                f"{name}, {running} running, {what}: measured {1e3 * median:.1f} ms, "
                f"predicted / measured {statistics.median(ratios):.2f} [{ratios[0]:.2f}-{ratios[-1]:.2f}]",
                flush=True,
            )


if __name__ == "__main__":
    main()
