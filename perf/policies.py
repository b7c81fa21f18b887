"""Router policies on four real schedulers in virtual time: `python perf/policies.py`.

Each scheduler is that of the engine, in front of an executor that computes nothing but the time of each step (Llama 3.1
8B on an H100; `--slow 2`: one whose steps take twice as long is among them). A mix of requests comes at a share of what
the replicas can do; the router knows what the real one does. For each mix, load and policy there is a line: hit rate,
that of one endless cache, TTFT, shares of requests in time, and goodput (requests a second whose first token comes
within 0.3 s and the others at 50 a second or more): medians of several draws of the requests. The last lines compare
the default with the aims: hit rate of conversations at least 0.9 of the endless cache's, p99 of TTFT with a hot prefix
and with random prompts at most 1.1 of `least_loaded`'s, goodput at most 5% below the best policy's. They have the least
of the draws, the median and the most.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardline.messages.step import StepPlan
from shardline.planner.catalog import find_model
from shardline.planner.cluster import parse_cluster
from shardline.planner.hardware import known_gpus
from shardline.planner.layout import Demand
from shardline.planner.search import Fixed, search
from shardline.planner.simulation.replica import ReplicaSetup, SimulatedReplica, StepClock
from shardline.planner.simulation.simulate import replica_setup
from shardline.planner.simulation.workload import SimulatedRequest
from shardline.planner.timing import step_load
from shardline.routing.policies.base import ReplicaLoad
from shardline.routing.router import CHUNK_TOKENS, Router

REPLICAS = 4
BLOCK = 16
POLICIES = ("round_robin", "least_loaded", "power_of_two", "prefix_hash", "cache_aware", "least_work")
DEFAULT = "least_work"
TTFT, TPOT = 0.3, 0.02
Prompt = tuple[tuple[int, int], ...]
Vector = NDArray[np.float64]


class SlowClock(StepClock):
    """One whose steps take longer."""

    factor = 1.0

    def plan_seconds(self, plan: StepPlan) -> float:
        return self.factor * super().plan_seconds(plan)

    def decode_seconds(self, num_seqs: int, contexts: Vector) -> Vector:
        return np.asarray(self.factor * super().decode_seconds(num_seqs, contexts))


class Writer:
    """Parts of prompts that nobody else has."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self._number = 0

    def fresh(self, count: int) -> Prompt:
        """So many new tokens."""
        self._number += 1
        return (self._number, 1), (0, count - 1)


def conversations(writer: Writer, count: int) -> Iterator[tuple[float, Prompt, int]]:
    """Conversations that begin at random times within a second; turns follow after 10 to 40 s, here counted in units
    in which all conversations begin within one. Four applications, each with 500 tokens of its own at the beginning."""
    applications = [writer.fresh(500) for _ in range(4)]
    while count > 0:
        now, prompt = writer.dice.random(), writer.dice.choice(applications)
        for _ in range(min(count, writer.dice.randrange(2, 9))):
            prompt = (*prompt, *writer.fresh(writer.dice.randrange(50, 800)))
            answer = writer.dice.randrange(50, 300)
            yield now, prompt, answer
            prompt = (*prompt, (0, answer))
            now += writer.dice.uniform(0.1, 0.4)
            count -= 1


def hot_prefix(writer: Writer, count: int) -> Iterator[tuple[float, Prompt, int]]:
    """All prompts begin with the same 3,000 tokens."""
    common = writer.fresh(3000)
    for _ in range(count):
        own = writer.fresh(writer.dice.randrange(50, 400))
        yield writer.dice.random(), (*common, *own), writer.dice.randrange(50, 300)


def many_prefixes(writer: Writer, count: int) -> Iterator[tuple[float, Prompt, int]]:
    """Forty beginnings of 2,000 tokens, some of which are more popular than others."""
    common = [writer.fresh(2000) for _ in range(40)]
    for _ in range(count):
        place = min(int(writer.dice.paretovariate(1.0)) - 1, 39)
        own = writer.fresh(writer.dice.randrange(50, 400))
        yield writer.dice.random(), (*common[place], *own), writer.dice.randrange(50, 300)


def random_prompts(writer: Writer, count: int) -> Iterator[tuple[float, Prompt, int]]:
    """Nothing in common; lengths of all kinds."""
    for _ in range(count):
        length = writer.dice.choice((100, 400, 1000, 6000))
        yield writer.dice.random(), writer.fresh(length), writer.dice.choice((20, 100, 400))


def everything(writer: Writer, count: int) -> Iterator[tuple[float, Prompt, int]]:
    """A quarter of each."""
    for make in (conversations, hot_prefix, many_prefixes, random_prompts):
        yield from make(writer, count // 4)


MIXES = {one.__name__: one for one in (conversations, hot_prefix, many_prefixes, random_prompts, everything)}


@dataclass(frozen=True)
class Found:
    """What requests have seen, in seconds, the share of prompts that was cached, and those of requests in time."""

    hits: float
    ttft: tuple[float, float]
    begun_in_time: float
    fast_enough: float
    goodput: float
    seconds: float


def serve(setups: Sequence[ReplicaSetup], policy: str, requests: Sequence[SimulatedRequest]) -> Found:
    """Route requests, which come in order of arrival, by what replicas say at that moment."""
    router = Router(policy)
    replicas = [SimulatedReplica(setup, 1e9) for setup in setups]
    for index, setup in enumerate(setups):
        measure(router, index, setup.clock)
    for number, request in enumerate(requests):
        loads = []
        for index, replica in enumerate(replicas):
            replica.advance(request.arrival)
            running, tokens, pending = replica.load
            limit = setups[index].limits.max_num_seqs
            loads.append(ReplicaLoad(running, tokens, index, limit, pending_chunks=pending))
        decision = router.decide(request.token_ids() if router.uses_prefix else (), "", loads)
        replicas[decision.number].add(number, request, decision.cost)
    outcomes = []
    for replica in replicas:
        replica.advance()
        outcomes.append(replica.outcome())
    times = np.concatenate([np.frombuffer(outcome.times).reshape(-1, 4) for outcome in outcomes])
    arrival, first, last, length = times.T
    ttft, tpot = first - arrival, (last - first) / np.maximum(1, length - 1)
    queries = sum(outcome.prefix_queries for outcome in outcomes)
    hits = sum(outcome.prefix_hits for outcome in outcomes) / queries
    begun, fast = ttft <= TTFT, tpot <= TPOT
    good = float((begun & fast).sum()) / max(requests[-1].arrival, 1e-9)
    percentiles = float(np.percentile(ttft, 50)), float(np.percentile(ttft, 99))
    return Found(hits, percentiles, float(begun.mean()), float(fast.mean()), good, float(last.max()))


def measure(router: Router, index: int, clock: StepClock) -> None:
    """Tell the router what a replica's counters say after a while: steps of 32 sequences, and chunks of prompts."""
    step = float(clock.decode_seconds(32, np.array([1000.0]))[0])
    prompt = step_load(clock.work, clock.cluster, 0, 0.0, 2048.0, 1024.0).seconds(clock.constants)
    chunk = getattr(clock, "factor", 1.0) * prompt * CHUNK_TOKENS / 2048
    for chunks in range(16):
        router.paces.add(index, 16, chunks, 16 * step + chunks * chunk)


def endless_hits(requests: Sequence[SimulatedRequest]) -> float:
    """The share of prompts that one cache which forgets nothing would have."""
    known: set[int] = set()
    found = total = 0
    for request in requests:
        tokens = [*request.token_ids(), *[0] * request.output_len]
        chain, is_known = 0, True
        for end in range(BLOCK, len(tokens) + 1, BLOCK):
            chain = hash((chain, *tokens[end - BLOCK : end]))
            is_known = is_known and chain in known
            found += BLOCK * (is_known and end < request.input_len)
            known.add(chain)
        total += request.input_len
    return found / total


def make_requests(mix: str, count: int, seconds: float, seed: int) -> list[SimulatedRequest]:
    """The requests of a mix, which begin within a time."""
    parts = sorted(MIXES[mix](Writer(seed), count))
    return [SimulatedRequest(at * seconds, prompt, answer) for at, prompt, answer in parts]


def h100() -> ReplicaSetup:
    """Llama 3.1 8B on one H100."""
    fixed = Fixed(tensor=1, pipeline=1, data=1, weights="bf16", kv="auto")
    demand = Demand(8192, input_len=1024, output_len=200)
    cluster = parse_cluster("1xH100", known_gpus())
    plan = search(find_model("meta-llama/Llama-3.1-8B-Instruct"), cluster, demand, "cost", None, fixed)
    return replica_setup(plan, plan.options[0])


def report(mix: str, load: float, draws: Sequence[dict[str, Found]], endless: Sequence[float]) -> str:
    """Print what was found for a mix at a load in each draw; returns how the default compares with the aims."""
    known = statistics.median(endless)
    for policy in draws[0]:
        runs = [draw[policy] for draw in draws]
        figures = [(run.hits, *run.ttft, run.begun_in_time, run.fast_enough, run.goodput) for run in runs]
        hits, middle, tail, begun, fast, goodput = map(statistics.median, zip(*figures, strict=True))
        print(f"{mix:15} load {load:4.2f}  {policy:13} hits {hits:5.3f} of {known:5.3f}   "
              f"TTFT ms p50 {1e3 * middle:7.1f} p99 {1e3 * tail:8.1f}, in time {begun:4.2f}   "
              f"fast enough {fast:4.2f}   goodput {goodput:6.2f}/s", flush=True)  # fmt: skip
    ratios = [draw[DEFAULT].goodput / max(run.goodput for run in draw.values()) for draw in draws]
    aims = f"{mix:15} load {load:4.2f}  goodput / best {spread(ratios)} (0.95)"
    if mix == "conversations":
        ratios = [draw[DEFAULT].hits / share for draw, share in zip(draws, endless, strict=True)]
        aims += f"   hits / endless {spread(ratios)} (0.9)"
    if mix in ("hot_prefix", "random_prompts") and "least_loaded" in draws[0]:
        ratios = [draw[DEFAULT].ttft[1] / draw["least_loaded"].ttft[1] for draw in draws]
        aims += f"   p99 TTFT / least_loaded {spread(ratios)} (1.1)"
    return aims


def spread(values: Sequence[float]) -> str:
    """The least of them, the median, and the most."""
    return f"{min(values):5.3f} {statistics.median(values):5.3f} {max(values):5.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000, help="of each run")
    parser.add_argument("--seeds", type=int, default=3, help="draws of the requests")
    parser.add_argument("--loads", type=float, nargs="+", default=(0.5, 0.7, 0.9, 1.3), help="shares of the throughput")
    parser.add_argument("--slow", type=float, default=1.0, help="how much longer the steps of one replica take")
    parser.add_argument("--mixes", nargs="+", default=[*MIXES], choices=MIXES)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    args = parser.parse_args()
    setup = h100()
    slow = SlowClock(setup.clock.work, setup.clock.cluster, setup.clock.constants)
    SlowClock.factor = args.slow
    setups = [setup if args.slow == 1.0 else dataclasses.replace(setup, clock=slow), *[setup] * (REPLICAS - 1)]
    aims, seeds = [], range(1, args.seeds + 1)
    for mix in args.mixes:
        most = [serve(setups, "least_loaded", make_requests(mix, args.requests, 0.0, seed)).seconds for seed in seeds]
        for load in args.loads:
            requests = [make_requests(mix, args.requests, most[seed - 1] / load, seed) for seed in seeds]
            draws = [{policy: serve(setups, policy, draw) for policy in args.policies} for draw in requests]
            aims.append(report(mix, load, draws, [endless_hits(draw) for draw in requests]))
    print("\n".join(["", f"The default, {DEFAULT}, with its aims in brackets:", *aims]))


if __name__ == "__main__":
    main()
