"""Runs a Scheduler against fake workers and checks what must hold whatever happens."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Set
from dataclasses import dataclass

import msgspec

from shardline.config.speculation import NO_SPECULATION, Speculation
from shardline.deployment.deployment import CachePlan, FixedPool, StepLimits
from shardline.engine.context_pool import ContextPool
from shardline.engine.scheduling.scheduler import Scheduler
from shardline.messages.copies import CopyResult
from shardline.messages.request import Request, SequenceOutput
from shardline.messages.step import StepPlan, StepResult
from shardline.models.kv_groups import KVGroup
from tests.engine.fake_worker import FakeWorker, reference
from tests.engine.lru_tier import CountingTier

FULL = (KVGroup((0,), None),)


@dataclass(frozen=True)
class Shape:
    """How an engine is set up."""

    groups: tuple[KVGroup, ...] = FULL
    num_blocks: int = 65
    block_size: int = 4
    max_model_len: int = 128
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 64
    max_prefill_tokens: int = 0
    least_prefill_share: int = 128
    max_in_flight: int = 1
    pipeline: bool = False
    prefix_caching: bool = True
    tokens_per_result: int = 1
    speculation: Speculation = NO_SPECULATION
    tier_slots: int = 0
    """0: there is no tier."""
    tier_files: bool = False
    most_fetches: int = 9
    context: int = 1


def cache_plan(
    groups: tuple[KVGroup, ...], block_size: int, *, prefix_caching: bool = True, context: int = 1
) -> CachePlan:
    """What a scheduler needs to know of a KV cache; its sizes in bytes are no matter."""
    return CachePlan("float32", groups, block_size, 1, prefix_caching, False, (1,), 1, FixedPool(1), context=context)


class Engine:
    """The engine loop, one verb at a time."""

    def __init__(self, shape: Shape, loses: Callable[[], bool] = lambda: False) -> None:
        """`loses`: whether a worker's next fetch finds nothing."""
        self.shape = shape
        files: set[bytes] | None = set() if shape.tier_files else None
        self.tier = CountingTier(shape.tier_slots, files, shape.context) if shape.tier_slots else None
        self.scheduler = Scheduler(
            StepLimits(
                shape.max_num_seqs,
                shape.max_num_batched_tokens,
                shape.speculation,
                shape.max_prefill_tokens,
                shape.least_prefill_share,
            ),
            cache_plan(shape.groups, shape.block_size, prefix_caching=shape.prefix_caching, context=shape.context),
            shape.num_blocks,
            shape.max_model_len,
            max_in_flight=shape.max_in_flight,
            last_token_known=shape.pipeline,
        )
        if self.tier is not None:
            self.scheduler.kv.add_tier(self.tier, shape.most_fetches)
        workers = [True, False] if shape.pipeline else [True]
        self.workers = [
            FakeWorker(
                shape.groups,
                shape.block_size,
                max_model_len=shape.max_model_len,
                sees_samples=sees,
                tokens_per_result=shape.tokens_per_result,
                loses=loses,
            )
            for sees in workers
        ]
        self.in_flight: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.outputs: dict[str, list[SequenceOutput]] = defaultdict(list)
        self.requests: dict[str, Request] = {}
        self._salts: dict[int, str] = {}
        self._tables: dict[int, list[list[int]]] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            self.scheduler.add_request(request)

    def submit(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self._check_plan(plan)
        self.in_flight.append(plan)
        self.plans.append(plan)
        return plan

    def collect(self) -> None:
        plan = self.in_flight.popleft()
        results: list[StepResult] = [worker.run(plan, self._salts) for worker in self.workers]
        result = results[0]
        if plan.copies is not None:
            copied = [other.copied for other in results if other.copied is not None]
            result = msgspec.structs.replace(result, copied=sum(copied, CopyResult()))
        self._take(self.scheduler.update(plan, result))

    def turn(self) -> None:
        """One turn of the loop: fill the pipeline, collect one result."""
        while len(self.in_flight) < self.shape.max_in_flight:
            if (self.in_flight and self.scheduler.awaits_tokens) or self.submit() is None:
                break
        if self.in_flight:
            self.collect()
        else:
            self._take(self.scheduler.take_outputs())
            assert not self.scheduler.has_unfinished, "nothing is in flight, and yet nothing was scheduled"

    def run(self, max_turns: int = 10_000, before_turn: Callable[[], None] = lambda: None) -> int:
        """Turn until all is done; the number of turns."""
        turns = 0
        while self.scheduler.has_unfinished:
            before_turn()
            self.turn()
            turns += 1
            assert turns <= max_turns, "no progress"
        return turns

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def finish_reason(self, name: str) -> str | None:
        return self.outputs[name][-1].finish_reason

    def check_done(self, aborted: Set[str] = frozenset()) -> None:
        """Every request got the tokens it gets alone, every sequence was ended, every block given back."""
        for name, request in self.requests.items():
            outputs = self.outputs[name]
            assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
            if outputs[-1].finish_reason == "error":
                assert outputs[-1].error
                continue
            expected, reason = reference(request, self.shape.max_model_len)
            if outputs[-1].finish_reason == "abort":
                assert name in aborted
                assert self.tokens(name) == expected[: len(self.tokens(name))]
            else:
                assert (self.tokens(name), outputs[-1].finish_reason) == (expected, reason)
                assert outputs[-1].stop_token_id == (expected[-1] if reason == "stop" else None)
        stats = self.scheduler.stats()
        assert (stats.kv_blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.generation_tokens == sum(len(self.tokens(name)) for name in self.requests)
        self._check_forgotten()

    def _check_forgotten(self) -> None:
        started = [start.seq_id for plan in self.plans for start in plan.starts]
        ended = [seq_id for plan in self.plans for seq_id in plan.ends] + self.scheduler.queues.ends
        assert sorted(started) == sorted(ended)
        assert not self.scheduler.queues.draining
        assert not self.scheduler.registry._by_id
        pool = self.scheduler.kv.pool
        for of_rank in pool._pools if isinstance(pool, ContextPool) else [pool]:
            assert not any(of_rank._references)
        assert pool.num_free == self.shape.num_blocks - self.shape.context
        assert not self.scheduler.queues.fetching
        if (traffic := self.scheduler.kv.traffic) is not None:
            assert not traffic.is_fetching
            assert not traffic.has_copies
        assert self.tier is None or not self.tier.fetching

    def _take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            assert output.token_ids or output.finish_reason in ("abort", "error")
            self.outputs[output.request_id].append(output)

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.shape.max_num_batched_tokens
        assert plan.steps or plan.copies is not None
        assert all(step.num_tokens > 0 for step in plan.steps)
        assert len(plan.steps) <= self.shape.max_num_seqs
        assert plan.num_samples <= self.scheduler.max_samples
        assert {start.seq_id for start in plan.starts} <= {step.seq_id for step in plan.steps}
        for start in plan.starts:
            sequence = next(s for s in self.scheduler.queues.running if s.seq_id == start.seq_id)
            self._salts[start.seq_id] = sequence.request.cache_salt
            assert start.token_ids == sequence.tokens
        if self.shape.pipeline:
            decoding = [{s.seq_id for s in p.steps if s.sample} for p in [*self.in_flight, plan]]
            assert sum(map(len, decoding)) == len(set().union(*decoding))
        self._check_exclusive(plan)

    def _check_exclusive(self, plan: StepPlan) -> None:
        """No block that a plan in flight uses for one sequence is written by this plan for another."""
        users: dict[int, set[int]] = defaultdict(set)
        for flying in self.in_flight:
            for step in flying.steps:
                for table, group in zip(self._tables[step.seq_id], self.shape.groups, strict=True):
                    for block in self._used(table, group, step.start, step.start + step.num_tokens):
                        users[block].add(step.seq_id)
        fetched = set[int]() if plan.copies is None else {copy.block for copy in plan.copies.fetches}
        assert not any(users[block] for block in fetched)
        for step in plan.steps:
            tables = self._tables.setdefault(step.seq_id, [[] for _ in self.shape.groups])
            first = step.start // self.shape.block_size
            for table, new_blocks, group in zip(tables, step.new_blocks, self.shape.groups, strict=True):
                table.extend(new_blocks)
                used = self._used(table, group, step.start, step.start + step.num_tokens)
                assert fetched.isdisjoint(used), "a step reads what its plan fetches, which may be lost"
                for block in table[first : -(-(step.start + step.num_tokens) // self.shape.block_size)]:
                    assert users[block] <= {step.seq_id}

    def _used(self, table: list[int], group: KVGroup, start: int, end: int) -> list[int]:
        size = self.shape.block_size
        first = 0 if group.window is None else max(0, start - group.window + 1)
        return table[first // size : -(-end // size)]
