"""The simulator against the real engine on this CPU: `python perf/simulator.py`.

The real engine serves two loads, which calibrate the simulator's constants: one request at a time, and several that
start together. Then both serve another load, at random times, and the script prints throughput, TTFT and TPOT of both.
Aim: within a tenth. The engine serves this load twice, with the same arrivals: how far it is from itself is what no
simulator can predict. The machine's speed varies, so the engine serves the loads in turns, and it has one thread: two
would share their cores with this script.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardline.api.async_llm import AsyncLLM
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment, FixedPool
from shardline.deployment.here import resolve_here
from shardline.planner.auto import HOST_TIMING, cpu_cluster
from shardline.planner.calibration import Measured, calibrate
from shardline.planner.catalog import shipped_facts
from shardline.planner.simulation.replica import ReplicaSetup, SimulatedReplica, StepClock
from shardline.planner.simulation.workload import SimulatedRequest, poisson
from shardline.planner.speed import deployment_work
from shardline.planner.timing import Load, loop_steps
from shardline.sampling_params import SamplingParams

INPUT_LEN, OUTPUT_LEN = 128, 48
CALIBRATION_RUNNING = (1, 4)
LOAD_SHARE = 0.7
"""The other load, as a share of the throughput that the calibration saw."""
_DICE = random.Random(1)
"""One for all calls, so that no prompt is in the prefix cache."""


@dataclass
class Served:
    """What requests have seen, in seconds."""

    seconds: float
    ttft: list[float]
    tpot: list[float]

    def add(self, other: Served) -> None:
        """Join what another turn has seen."""
        self.seconds += other.seconds
        self.ttft += other.ttft
        self.tpot += other.tpot

    @property
    def requests_per_second(self) -> float:
        """Throughput."""
        return len(self.ttft) / self.seconds

    def show(self, name: str) -> list[float]:
        """Print and return tokens per second, and p50 and p90 of TTFT and TPOT."""
        values = [self.requests_per_second * OUTPUT_LEN]
        values += [float(value) for one in (self.ttft, self.tpot) for value in np.percentile(one, (50, 90))]
        print(f"{name:10} {values[0]:8.1f} tok/s   TTFT ms p50 {1e3 * values[1]:7.2f} p90 {1e3 * values[2]:7.2f}   "
              f"TPOT ms p50 {1e3 * values[3]:6.3f} p90 {1e3 * values[4]:6.3f}")  # fmt: skip
        return values


async def serve(llm: AsyncLLM, requests: Sequence[SimulatedRequest], most: int) -> Served:
    """Serve requests that arrive at their times, at most `most` at once."""
    slots = asyncio.Semaphore(most)
    served = Served(0.0, [], [])
    started = time.perf_counter()

    async def one(request: SimulatedRequest) -> None:
        await asyncio.sleep(max(0.0, started + request.arrival - time.perf_counter()))
        prompt = [_DICE.randrange(10, 2000) for _ in range(request.input_len)]
        params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True)
        async with slots:
            sent = time.perf_counter()
            first = 0.0
            async for _ in llm.generate(prompt, params):  # type: ignore[arg-type]
                first = first or time.perf_counter()
        served.ttft.append(first - sent)
        served.tpot.append((time.perf_counter() - first) / (request.output_len - 1))

    await asyncio.gather(*map(one, requests))
    served.seconds = time.perf_counter() - started
    return served


def replica(deployment: Deployment, measured: Sequence[Measured]) -> ReplicaSetup:
    """The deployment's replica, with constants that the measurements have calibrated."""
    cluster = cpu_cluster(deployment.machine, 1, threads=1).part(1)
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
        overlaps_steps=deployment.grid.world_size > 1,
    )


def small_model(folder: Path) -> str:
    """A folder with the configuration of a model of 0.2 B parameters, whose steps take longer than the front's work."""
    config = dict(shipped_facts()["models"]["Qwen/Qwen3-0.6B"]["config"], num_hidden_layers=10, vocab_size=32000)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def run_simulation(setup: ReplicaSetup, turns: Sequence[Sequence[SimulatedRequest]]) -> Served:
    """The same turns in virtual time."""
    seconds, times = 0.0, []
    for requests in turns:
        simulated = SimulatedReplica(setup, 1.0)
        for number, request in enumerate(requests):
            simulated.add(number, request)
        simulated.advance()
        times.append(np.frombuffer(simulated.outcome().times).reshape(-1, 4))
        seconds += times[-1][:, 2].max()
    arrival, first, last, _ = np.concatenate(times).T
    return Served(seconds, list(first - arrival), list((last - first) / (OUTPUT_LEN - 1)))


async def main(folder: Path, num_turns: int, seconds: float) -> None:
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
    together = list(poisson(float("inf"), 4, INPUT_LEN, OUTPUT_LEN))
    await serve(llm, together, 4)
    calibrating = {running: Served(0.0, [], []) for running in CALIBRATION_RUNNING}
    first, again, turns = Served(0.0, [], []), Served(0.0, [], []), []
    for turn in range(num_turns):
        for running, served in calibrating.items():
            served.add(await serve(llm, together[: max(2, running)], running))
        rate = LOAD_SHARE * calibrating[CALIBRATION_RUNNING[-1]].requests_per_second
        turns.append(list(poisson(rate, int(seconds * rate), INPUT_LEN, OUTPUT_LEN, seed=turn)))
        for served in (first, again):
            served.add(await serve(llm, turns[-1], 1000))
    await llm.close()
    measured = []
    for running, served in calibrating.items():
        served.show(f"at {running}")
        # Queues add step times up, so slow steps count: a median would leave them out.
        means = float(np.mean(served.ttft)), float(np.mean(served.tpot))
        measured.append(Measured(running, INPUT_LEN, OUTPUT_LEN, *means))
    one, other = first.show("engine"), again.show("again")
    first.add(again)
    both = first.show("both")
    simulated = run_simulation(replica(deployment, measured), turns).show("simulated")
    for title, above, below in (("again / engine", other, one), ("simulated / both", simulated, both)):
        print(f"{title:16} " + "  ".join(f"{x / y:.2f}" for x, y in zip(above, below, strict=True)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4, help="turns of the loads (default: 4)")
    parser.add_argument("--seconds", type=float, default=6.0, help="the compared load's part of a turn (default: 6)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(main(Path(place), options.turns, options.seconds))
