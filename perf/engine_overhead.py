"""The scheduler's own time per step: `python perf/engine_overhead.py`.

There is no model and no worker. Results are made up at once, so the measured time is only schedule + update.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

from shardline.deployment.deployment import CachePlan, FixedPool, StepLimits
from shardline.engine.scheduling.scheduler import Scheduler
from shardline.messages.request import Request
from shardline.messages.step import SequenceResult, StepPlan, StepResult
from shardline.models.kv_groups import KVGroup
from shardline.sampling_params import SamplingParams

BLOCK_SIZE = 16


def run_plan(plan: StepPlan) -> StepResult:
    """The answer that a worker could give."""
    return StepResult(plan.step_id, [SequenceResult(step.seq_id, [7]) for step in plan.steps if step.sample])


def decode_microseconds(
    num_seqs: int, context: int, steps: int, groups: tuple[KVGroup, ...], max_in_flight: int, pipeline: bool
) -> list[float]:
    """Microseconds of each step that only decodes. Every sequence has `context` tokens."""
    num_blocks = 2 + len(groups) * num_seqs * ((context + steps) // BLOCK_SIZE + 2)
    scheduler = Scheduler(
        StepLimits(max_num_seqs=num_seqs, max_num_batched_tokens=8192),
        CachePlan("bfloat16", groups, BLOCK_SIZE, 1, True, False, (1,), 1, FixedPool(num_blocks)),
        num_blocks,
        context + steps + 16,
        max_in_flight=max_in_flight,
        last_token_known=pipeline,
    )
    sampling = SamplingParams(max_tokens=steps, ignore_eos=True)
    for number in range(num_seqs):
        prompt = [(number * 7919 + position) % 32000 for position in range(context)]
        scheduler.add_request(Request(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling))
    in_flight: deque[StepPlan] = deque()
    times: list[float] = []
    while scheduler.has_unfinished:
        started = time.perf_counter()
        plan = scheduler.schedule()
        spent = time.perf_counter() - started
        if plan is not None:
            in_flight.append(plan)
        if plan is None or len(in_flight) == max_in_flight:
            oldest = in_flight.popleft()
            result = run_plan(oldest)
            started = time.perf_counter()
            scheduler.update(oldest, result)
            spent += time.perf_counter() - started
            if plan is not None and plan.num_tokens == len(plan.steps):
                times.append(spent * 1e6)
    return times


def main() -> None:
    """Print the median and the 99th percentile per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-seqs", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=256)
    options = parser.parse_args()
    full, windowed = (KVGroup((0,), None),), (KVGroup((0,), None), KVGroup((1,), 1024))
    cases = (
        ("one plan in flight", full, 1, False),
        ("two plans in flight", full, 2, False),
        ("two plans, full and window groups", windowed, 2, False),
        ("pipeline of four", full, 4, True),
    )
    print(f"{options.num_seqs} sequences of {options.context} tokens: schedule + update, microseconds per step")
    for name, groups, max_in_flight, pipeline in cases:
        times = decode_microseconds(options.num_seqs, options.context, options.steps, groups, max_in_flight, pipeline)
        tail = statistics.quantiles(times, n=100)[98]
        print(f"  {name:36} median {statistics.median(times):7.0f}   p99 {tail:7.0f}   ({len(times)} steps)")


if __name__ == "__main__":
    main()
