"""The step loop: schedule, execute, update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from shardline.channel import readable
from shardline.deployment.deployment import Deployment
from shardline.engine.adapters import AdapterSlots
from shardline.engine.commands import RankCommands
from shardline.engine.executor.base import Executor
from shardline.engine.expert_balancer import open_balancer
from shardline.engine.expert_load import expert_load
from shardline.engine.kv_events import KVEventFeed
from shardline.engine.masks.lanes import MaskLanes
from shardline.engine.masks.sequences import PATIENCE, SequenceMasks
from shardline.engine.scheduling.scheduler import Scheduler
from shardline.engine.speculative.ranks import DraftRanks, RankProposer
from shardline.engine.tiers import open_tiers
from shardline.messages.kv_events import KVEvent
from shardline.messages.request import Request, SequenceOutput
from shardline.messages.stats import EngineStats, ExpertLoad, RankTimes, merge_lockstep
from shardline.messages.step import StepPlan

_LOAD_SECONDS = 1.0
"""Age that the load of experts and the times of ranks may have while the engine is busy: they take long to read."""


class Engine:
    """One replica, or several in lockstep: a scheduler for each, and the executor that runs their plans.

    Replicas in lockstep share experts, so a rank cannot run a layer without the others. A replica that has nothing to
    do takes part with an empty step.
    """

    def __init__(
        self,
        deployment: Deployment,
        executor: Executor,
        namespace: bytes | None = None,
        number: int = 0,
        draft_ranks: DraftRanks | None = None,
    ) -> None:
        """`executor` must have started. `namespace`: see `KVCache`. `number`: which of the deployment's engines it is.
        `draft_ranks`: those of the draft model, if it has ranks of its own.

        Raises:
            ValueError: KV events cannot be published where the user wants them.
        """
        self._deployment = deployment
        self._executor = executor
        self._schedulers = [
            Scheduler(
                deployment.limits,
                deployment.cache,
                executor.allocation.num_blocks,
                deployment.max_model_len,
                max_in_flight=executor.max_in_flight,
                last_token_known=deployment.last_token_known,
                namespace=namespace,
                proposer=None
                if draft_ranks is None
                else RankProposer(deployment.limits.speculation, draft_ranks, deployment.spec.vocab_size),
            )
            for _ in range(deployment.grid.data)
        ]
        self._files = open_tiers(deployment, [scheduler.kv.add_tier for scheduler in self._schedulers])
        self._events: KVEventFeed | None = None
        if (cache := deployment.cache).events.publishes or cache.events_to_front:
            logs = [scheduler.kv.log_events() for scheduler in self._schedulers]
            self._events = KVEventFeed(cache, number * deployment.grid.data, logs)
        self._masks = SequenceMasks(MaskLanes(deployment.model.tokenizer_file))
        self._commands = RankCommands(executor)
        self._adapters: AdapterSlots | None = None
        if deployment.adapters.num_slots:
            self._adapters = AdapterSlots(deployment.adapters.num_slots, self._commands.give)
        self._balancer = open_balancer(deployment, self._commands.give, executor.expert_load)
        self._in_flight: deque[list[StepPlan]] = deque()
        self._engine_seconds = 0.0
        self._expert_load: ExpertLoad | None = None
        self._rank_times: list[RankTimes] = []
        self._load_time = 0.0

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._in_flight) or any(scheduler.has_unfinished for scheduler in self._schedulers)

    def add_request(self, request: Request) -> None:
        """Queue a request on the replica that has the fewest."""
        scheduler = min(self._schedulers, key=lambda scheduler: scheduler.registry.num_live)
        sequence = scheduler.add_request(request, time.monotonic())
        if sequence is not None and sequence.has_grammar:
            self._masks.begin(scheduler, sequence)
        if sequence is not None and request.adapter is not None:
            assert self._adapters is not None, "the deployment takes no adapters"
            self._adapters.begin(scheduler, sequence)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Forget requests; unknown ids are ignored."""
        for scheduler in self._schedulers:
            scheduler.abort_requests(request_ids)
        if self._masks.followed:
            self._masks.forget_finished()

    def reset_prefix_cache(self) -> None:
        """Let later requests find nothing in the prefix cache that is there now."""
        for scheduler in self._schedulers:
            scheduler.kv.reset_prefixes()

    def close(self) -> None:
        """End the processes that compute masks, and the sockets of events. The executor stays."""
        self._masks.close()
        if self._files is not None:
            self._files.close()
        if self._events is not None:
            self._events.close()

    def step(self) -> list[SequenceOutput]:
        """Submit as many steps as the executor takes, wait for the oldest one, and return its outputs.

        Raises:
            ExecutorFailure: a rank died, failed or missed its deadline.
        """
        started = time.perf_counter()
        if self._masks.followed:
            self._masks.collect(0.0)
        if self._commands.awaited:
            self._commands.settle()
        if self._adapters is not None:
            self._adapters.settle()
        while len(self._in_flight) < self._executor.max_in_flight:
            if self._in_flight and self._awaits_step():
                break
            plans = self._schedule()
            if not plans:
                break
            self._executor.submit_step(plans)
            self._in_flight.append(plans)
        waited = 0.0
        outputs: list[SequenceOutput] = []
        if not self._in_flight:
            if self._commands.awaited and (fds := self._executor.watched_fds()):
                readable(fds, PATIENCE)
            self._executor.check_ranks()  # nothing else reads what they send
            if self._masks.followed and not any(scheduler.registry.has_outputs for scheduler in self._schedulers):
                self._masks.collect(PATIENCE)
            for scheduler in self._schedulers:
                outputs += scheduler.take_outputs()
        else:
            before = time.perf_counter()
            results = self._executor.collect_results()
            waited = time.perf_counter() - before
            if self._masks.followed:
                results = self._masks.follow_results(self._schedulers, results)
            now = time.monotonic()
            for scheduler, plan, result in zip(self._schedulers, self._in_flight.popleft(), results, strict=True):
                outputs += scheduler.update(plan, result, now)
            if self._balancer is not None:
                self._balancer.note_step()
        if self._masks.followed:
            self._masks.forget_finished()
        if self._events is not None:
            self._events.tell()
        self._engine_seconds += time.perf_counter() - started - waited
        return outputs

    def take_events(self) -> Sequence[KVEvent]:
        """What happened to the prefix cache since the last call, if the front follows it."""
        return () if self._events is None else self._events.take()

    def _awaits_step(self) -> bool:
        """Whether a sequence cannot be planned before the steps in flight, or would have no draft.

        Without it, a batch would fall apart. A pipeline's plans in flight have disjoint sequences anyway.
        """
        if any(scheduler.awaits_tokens for scheduler in self._schedulers):
            return True
        if not self._masks.followed or self._deployment.grid.pipeline > 1:
            return False
        flights = [flight for scheduler in self._schedulers for flight in scheduler.in_flight]
        return any(step.allowed for flight in flights for step in flight.plan.steps)

    def _schedule(self) -> list[StepPlan]:
        """The next plan of every replica; empty if no replica can run anything."""
        now = time.monotonic()
        plans = [scheduler.schedule(now) for scheduler in self._schedulers]
        if not any(plans):
            return []
        return [plan or scheduler.schedule_idle() for plan, scheduler in zip(plans, self._schedulers, strict=True)]

    def stats(self) -> EngineStats:
        """Counters since the start, and current gauges."""
        now = time.monotonic()
        deployment = self._deployment
        if not self.busy or now - self._load_time > _LOAD_SECONDS:
            self._load_time = now
            self._rank_times = self._executor.rank_times()
            if deployment.num_experts:
                counts = self._executor.expert_load()
                self._expert_load = expert_load(
                    counts, deployment.grid, deployment.stages, deployment.expert_parallel, self._balancer
                )
        replicas = [
            msgspec.structs.replace(
                scheduler.stats(),
                tier=None if (traffic := scheduler.kv.traffic) is None else traffic.stats(),
                engine_seconds=self._engine_seconds,
            )
            for scheduler in self._schedulers
        ]
        replicas[0] = msgspec.structs.replace(replicas[0], experts=self._expert_load, ranks=self._rank_times)
        return replicas[0] if len(replicas) == 1 else merge_lockstep(replicas)
