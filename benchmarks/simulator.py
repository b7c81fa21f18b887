"""The simulator against the real engine on this CPU: `python benchmarks/simulator.py`.

The real engine serves two loads, which calibrate the simulator's constants: one request at a time, and several that
start together. Then both serve another load, at random times, and the script prints throughput, TTFT and TPOT of both.
Aim: within a tenth. The machine's speed varies, so the engine serves the first loads once more after the other one,
and it has one thread: two would share the memory with other machines, and their cores with this script.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardline.api.async_llm import AsyncLLM
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment, FixedPool
from shardline.deployment.here import resolve_here
from shardline.planner.auto import deployment_work
from shardline.planner.calibration import Measured, calibrate
from shardline.planner.catalog import shipped_facts
from shardline.planner.host import HOST_TIMING, measure_host, share_host
from shardline.planner.layout import Demand
from shardline.planner.simulation.clock import StepClock
from shardline.planner.simulation.replica import ReplicaSetup
from shardline.planner.simulation.simulate import Simulation, simulate
from shardline.planner.simulation.workload import SimulatedRequest, poisson
from shardline.planner.timing import Load, loop_steps
from shardline.sampling_params import SamplingParams

INPUT_LEN, OUTPUT_LEN = 128, 48
CALIBRATION_RUNNING = (1, 4)
LOAD_SHARE = 0.7
"""The other load, as a share of the throughput that the calibration saw."""
_DICE = random.Random(1)
"""One for all calls, so that no prompt is in the prefix cache."""


async def serve(
    llm: AsyncLLM, requests: Sequence[SimulatedRequest], most: int
) -> tuple[float, list[float], list[float]]:
    """(tokens per second, TTFTs, TPOTs) of requests that arrive at their times, at most `most` at once."""
    slots = asyncio.Semaphore(most)
    started = time.perf_counter()
    ttft, tpot = [], []

    async def one(request: SimulatedRequest) -> None:
        await asyncio.sleep(max(0.0, started + request.arrival - time.perf_counter()))
        prompt = [_DICE.randrange(10, 2000) for _ in range(request.input_len)]
        params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True)
        async with slots:
            sent = time.perf_counter()
            first = 0.0
            async for _ in llm.generate(prompt, params):  # type: ignore[arg-type]
                first = first or time.perf_counter()
        ttft.append(first - sent)
        tpot.append((time.perf_counter() - first) / (request.output_len - 1))

    await asyncio.gather(*map(one, requests))
    return len(requests) * OUTPUT_LEN / (time.perf_counter() - started), ttft, tpot


def replica(deployment: Deployment, measured: Sequence[Measured]) -> ReplicaSetup:
    """The deployment's replica, with constants that the measurements have calibrated."""
    cluster = share_host(measure_host(deployment.machine), deployment.machine.hosts[0].cores)
    work = deployment_work(deployment)
    chunk = deployment.limits.max_num_batched_tokens
    steps = [
        (
            loop_steps(
                work,
                cluster,
                Load(one.running, one.input_len, one.output_len, chunk, in_phase=one.running > 1),
                deployment.grid.pipeline,
            ),
            one,
        )
        for one in measured
    ]
    timing = calibrate(HOST_TIMING, steps)
    assert isinstance(deployment.cache.pool, FixedPool)
    return ReplicaSetup(
        StepClock(work, cluster, timing.constants),
        deployment.limits,
        deployment.cache,
        deployment.cache.pool.num_blocks,
        deployment.max_model_len,
        deployment.grid.pipeline,
    )


def show(name: str, rate: float, ttft: Sequence[float], tpot: Sequence[float]) -> list[float]:
    """Print and return tokens per second, and p50 and p90 of TTFT and TPOT."""
    values = [rate, *np.percentile(ttft, (50, 90)), *np.percentile(tpot, (50, 90))]
    print(f"{name:10} {values[0]:8.1f} tok/s   TTFT ms p50 {1e3 * values[1]:7.2f} p90 {1e3 * values[2]:7.2f}   "
          f"TPOT ms p50 {1e3 * values[3]:6.3f} p90 {1e3 * values[4]:6.3f}")  # fmt: skip
    return values


def small_model(folder: Path) -> str:
    """A folder with the configuration of a model of 0.2 B parameters, whose steps take longer than the front's work."""
    config = dict(shipped_facts()["models"]["Qwen/Qwen3-0.6B"]["config"], num_hidden_layers=10, vocab_size=32000)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


async def main(folder: Path, seconds: float) -> None:
    config = EngineConfig.from_options(
        model=small_model(folder),
        device="cpu",
        cpu_threads=1,
        load_format="dummy",
        max_model_len=1024,
        kv_cache_memory="1GiB",
    )
    deployment = resolve_here(config)
    llm = AsyncLLM(config)
    await llm.wait_ready()
    warm = list(poisson(float("inf"), 8, INPUT_LEN, OUTPUT_LEN))
    await serve(llm, warm, 2)
    measured: list[Measured] = []

    async def measure() -> float:
        for running in CALIBRATION_RUNNING:
            rate, ttft, tpot = await serve(llm, warm * (1 if running == 1 else 2), running)
            show(f"at {running}", rate, ttft, tpot)
            measured.append(Measured(running, INPUT_LEN, OUTPUT_LEN, float(np.median(ttft)), float(np.median(tpot))))
        return rate

    per_second = LOAD_SHARE * await measure() / OUTPUT_LEN
    requests = list(poisson(per_second, int(seconds * per_second), INPUT_LEN, OUTPUT_LEN, seed=3))
    real = show("engine", *await serve(llm, requests, 1000))
    await measure()
    setup = replica(deployment, measured)
    found: Simulation = simulate(setup, requests, Demand(INPUT_LEN + OUTPUT_LEN, INPUT_LEN, OUTPUT_LEN))
    simulated = [
        found.output_tokens_per_second,
        found.ttft[50],
        found.ttft[90],
        found.tpot[50],
        found.tpot[90],
    ]
    show(
        "simulated",
        simulated[0],
        [found.ttft[50]] * 9 + [found.ttft[90]] * 2,
        [found.tpot[50]] * 9 + [found.tpot[90]] * 2,
    )
    print("simulated / engine: " + "  ".join(f"{ours / true:.2f}" for ours, true in zip(simulated, real, strict=True)))
    await llm.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the compared workload (default: 20)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(main(Path(place), options.seconds))
