"""Run a workload through a router and its replicas, and sum up what requests saw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from shardline.deployment.deployment import CachePlan, Deployment, FixedPool, StepLimits
from shardline.deployment.probe import allowed_cpus
from shardline.models.kv_blocks import blocks_per_request
from shardline.models.kv_groups import kv_groups
from shardline.planner.cluster import Cluster
from shardline.planner.layout import Demand
from shardline.planner.memory import Fit, kv_dtype
from shardline.planner.search import Option, Plan
from shardline.planner.simulation.group import Group, Routed, replica_groups
from shardline.planner.simulation.replica import Outcome, ReplicaSetup, StepClock
from shardline.planner.simulation.report import Simulation, progress_bar, show_progress
from shardline.planner.simulation.workload import SimulatedRequest, Workload, poisson
from shardline.planner.speed import deployment_work, layout_work, step_limits
from shardline.planner.timing import Constants
from shardline.planner.vllm import BLOCK_SIZE
from shardline.routing.policies.base import ReplicaLoad
from shardline.routing.router import Router

_PERCENTILES = (50, 90, 95, 99)
_WORTH_PROCESSES = 20_000
"""Requests from which replicas run in several processes."""
_BUCKETS = 100
"""Points of the KV cache's use over time."""

Vector = NDArray[np.float64]


def replica_setup(plan: Plan, option: Option, *, prefix_caching: bool = True) -> ReplicaSetup:
    """A replica of a layout that fits, as the search sees it."""
    layout, fitted, demand, spec = option.layout, option.fit, plan.demand, plan.model.spec
    assert option.speed is not None, "the layout does not fit"
    used, constants = plan.cluster.part(layout.num_gpus), plan.timing[layout.engine].constants
    if fitted.deployment is not None:
        return _deployment_setup(fitted.deployment, used, fitted, constants)
    limits = StepLimits(*step_limits(layout, demand))
    groups = kv_groups(spec)
    block_size = int(demand.options.get("block_size", BLOCK_SIZE))
    per_request = blocks_per_request(groups, demand.max_model_len, block_size, limits.max_num_batched_tokens)
    num_blocks = 1 + int(fitted.concurrency / layout.data * per_request)
    cache = CachePlan(
        dtype=kv_dtype(layout, spec),
        groups=groups,
        block_size=block_size,
        max_blocks=-(-demand.max_model_len // block_size) + 1,
        prefix_caching=prefix_caching and not (spec.keeps_states and layout.engine == "shardline"),
        latents_shared=False,
        block_bytes=(),
        useful_blocks=num_blocks,
        pool=FixedPool(num_blocks),
    )
    clock = StepClock(
        layout_work(plan.model, layout, fitted),
        used,
        constants,
    )
    return ReplicaSetup(clock, limits, cache, num_blocks, demand.max_model_len, layout.pipeline)


def _deployment_setup(deployment: Deployment, cluster: Cluster, fitted: Fit, constants: Constants) -> ReplicaSetup:
    """A replica of a deployment on devices that `cluster` describes."""
    place, replicas = deployment.placements[0][0], fitted.layout.data
    per_request = blocks_per_request(
        deployment.cache.groups, fitted.max_model_len, deployment.cache.block_size,
        deployment.limits.max_num_batched_tokens,
    )  # fmt: skip
    return ReplicaSetup(
        StepClock(deployment_work(deployment), cluster, constants),
        deployment.limits,
        deployment.cache,
        1 + round(fitted.concurrency / replicas * per_request),
        deployment.max_model_len,
        deployment.grid.pipeline,
        overlaps_steps=deployment.grid.world_size > 1
        or not deployment.machine.hosts[place.host].devices[place.device].cores,
    )


def simulate_plan(plan: Plan, workload: Workload, demand: Demand | None = None) -> Simulation:
    """Run a workload on the best layout that fits. `demand` has its lengths and limits; None: those of the plan.

    Raises:
        ValueError: there is no such layout, or the router has no such policy.
    """
    if not plan.options or not plan.options[0].fits:
        raise ValueError("--simulate needs a layout that fits; the plan without it says what would")
    best = plan.options[0]
    assert best.speed is not None
    setup = replica_setup(plan, best, prefix_caching=workload.prefix_caching)
    speed = best.speed.output_tok_s.p50 / best.layout.data
    return _simulate_workload(setup, workload, demand or plan.demand, workload.replicas or best.layout.data, speed)


def _simulate_workload(
    setup: ReplicaSetup, workload: Workload, demand: Demand, replicas: int, tokens_per_second: float
) -> Simulation:
    """Run a workload. `tokens_per_second` of a replica decides only the resolution over time."""
    requests: Iterable[SimulatedRequest] = workload.trace
    if workload.trace:
        count, last = len(workload.trace), workload.trace[-1].arrival
        tokens = sum(request.output_len for request in workload.trace)
    else:
        count, last = workload.num_prompts, workload.num_prompts / workload.rate
        lengths = demand.input_len, demand.output_len
        requests = poisson(workload.rate, count, *lengths, workload.prefixes, workload.seed)
        tokens = count * demand.output_len
    return simulate(
        setup,
        requests,
        demand,
        num_replicas=replicas,
        policy=workload.policy,
        report_seconds=workload.report_seconds,
        # It ends about when the last request has come, or when all tokens can have been made.
        duration=max(last, tokens / tokens_per_second / replicas),
        progress=progress_bar(count),
    )


def simulate(
    setup: ReplicaSetup,
    requests: Iterable[SimulatedRequest],
    demand: Demand,
    *,
    num_replicas: int = 1,
    policy: str = Workload.policy,
    report_seconds: float = Workload.report_seconds,
    duration: float = 100.0,
    progress: tqdm[Any] | None = None,
) -> Simulation:
    """Run requests, which come in order of arrival, on equal replicas behind a router.

    `duration` is about how many seconds the workload lasts; it decides only the resolution over time. If choices
    depend on the load of replicas, the router sees loads that are up to `report_seconds` old, and what it has added
    since. `progress` knows how many requests there are, which decides whether several processes are worth it.

    Raises:
        ValueError: there is no such policy.
    """
    router = Router(policy, caches=setup.cache.prefix_caching)
    progress = progress if progress is not None else tqdm(total=0, disable=True)
    bucket = max(duration, 1e-3) / _BUCKETS
    # Choices that depend on no load need no reports: then all requests are routed in one window.
    window = report_seconds if router.uses_load and num_replicas > 1 else math.inf
    processes = min(allowed_cpus(), num_replicas) if (progress.total or 0) >= _WORTH_PROCESSES else 1
    with replica_groups(setup, bucket, num_replicas, processes) as groups:
        outcomes = list(_run(router, setup, requests, groups, num_replicas, window, progress))
    progress.close()
    return _summary(outcomes, setup, demand, num_replicas, policy, bucket)


def _run(
    router: Router,
    setup: ReplicaSetup,
    requests: Iterable[SimulatedRequest],
    groups: Sequence[Group],
    num_replicas: int,
    window: float,
    progress: tqdm[Any],
) -> Iterator[Outcome]:
    """Route the requests of one window of seconds after the other."""
    loads = [ReplicaLoad(0, 0, index, setup.limits.max_num_seqs) for index in range(num_replicas)]
    routed: list[list[Routed]] = [[] for _ in groups]
    end, number, uses_prefix = window, -1, router.uses_prefix and num_replicas > 1
    for number, request in enumerate(requests):
        if request.arrival >= end:
            end = (math.floor(request.arrival / window) + 1) * window
            for group, batch in zip(groups, routed, strict=True):
                group.begin_window(batch, end - window)
                batch.clear()
            for group in groups:
                for report in group.take_reports():
                    loads[report.replica] = loads[report.replica]._replace(
                        num_requests=report.num_requests,
                        num_tokens=report.num_tokens,
                        pending_chunks=report.pending_chunks,
                    )
            show_progress(progress, number - sum(load.num_requests for load in loads), end - window)
        decision = router.decide(request.token_ids() if uses_prefix else (), "", loads)
        index, cost = decision.number, decision.cost
        routed[index % len(groups)].append(Routed(index, number, request, cost))
        before = loads[index]
        loads[index] = before._replace(
            num_requests=before.num_requests + 1,
            num_tokens=before.num_tokens + request.input_len + request.output_len,
            pending_chunks=before.pending_chunks + cost,
        )
    for group, batch in zip(groups, routed, strict=True):
        group.begin_window(batch, math.inf)
    # Replicas report in turns, as all of them work.
    streams = [group.outcomes() for group in groups]
    done = number + 1 - sum(load.num_requests for load in loads)
    for index in range(num_replicas):
        yield next(streams[index % len(groups)])
        done += loads[index].num_requests
        show_progress(progress, done, None if math.isinf(end) else end)


def _summary(
    outcomes: Sequence[Outcome], setup: ReplicaSetup, demand: Demand, num_replicas: int, policy: str, bucket: float
) -> Simulation:
    times = np.concatenate([np.frombuffer(outcome.times, dtype=np.float64).reshape(-1, 4) for outcome in outcomes])
    arrival, first_token, finish, output_len = times.T
    ttft = first_token - arrival
    several = output_len > 1
    tpot = (finish - first_token)[several] / (output_len[several] - 1)
    all_tpot = np.zeros(len(ttft))
    all_tpot[several] = tpot
    good = (ttft <= (demand.ttft or math.inf)) & (all_tpot <= (demand.tpot or math.inf))
    seconds = float(finish.max() - arrival.min()) if len(finish) else 0.0
    queries = sum(outcome.prefix_queries for outcome in outcomes)
    return Simulation(
        num_requests=len(ttft),
        num_failed=sum(outcome.num_failed for outcome in outcomes),
        num_replicas=num_replicas,
        policy=policy,
        seconds=seconds,
        ttft=_percentiles(ttft),
        tpot=_percentiles(tpot),
        latency=_percentiles(finish - arrival),
        output_tokens_per_second=float(output_len.sum()) / seconds if seconds else 0.0,
        requests_per_second=len(ttft) / seconds if seconds else 0.0,
        goodput=float(good.sum()) / seconds if seconds else 0.0,
        num_preemptions=sum(outcome.num_preemptions for outcome in outcomes),
        prefix_hit_rate=sum(outcome.prefix_hits for outcome in outcomes) / queries if queries else 0.0,
        kv_use=_use_over_time(outcomes, setup, bucket),
        num_steps=sum(outcome.num_steps for outcome in outcomes),
        num_skipped=sum(outcome.num_skipped for outcome in outcomes),
    )


def _percentiles(values: Vector) -> dict[int, float]:
    return {percent: float(np.percentile(values, percent)) if len(values) else 0.0 for percent in _PERCENTILES}


def _use_over_time(outcomes: Sequence[Outcome], setup: ReplicaSetup, bucket: float) -> tuple[tuple[float, float], ...]:
    """(seconds, share of all blocks that sequences hold). A replica without work uses none."""
    used: dict[int, float] = {}
    for outcome in outcomes:
        for index, block_seconds in outcome.kv_use.items():
            used[index] = used.get(index, 0.0) + block_seconds
    whole = bucket * (setup.num_blocks - 1) * len(outcomes)
    return tuple((index * bucket, used.get(index, 0.0) / whole) for index in range(max(used, default=-1) + 1))
