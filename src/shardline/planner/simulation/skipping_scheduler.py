"""A scheduler for simulations: it does many equal decode steps at once, and the others with less work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardline.deployment.deployment import CachePlan, StepLimits
from shardline.engine.scheduling.plan_builder import PlanBuilder
from shardline.engine.scheduling.scheduler import PlanInFlight, Scheduler
from shardline.engine.scheduling.sequence import LiveSequence, State
from shardline.messages.request import SequenceOutput
from shardline.messages.step import SequenceResult, SequenceStep, StepPlan


class _QuickBuilder(PlanBuilder):
    """Places decode steps with less work; every token is the same one."""

    def __init__(self, scheduler: SkippingScheduler, max_tokens: int, token: int, block_size: int) -> None:
        super().__init__(scheduler.kv, scheduler.queues, scheduler.registry, scheduler.preemptions, max_tokens)
        self._token, self._block_size = token, block_size

    def place(
        self, sequence: LiveSequence, num_tokens: int, draft_token_ids: Sequence[int] = (), num_guesses: int = 0
    ) -> None:
        """See the base class. A decode step within a block needs no further block, and asks for no scores."""
        start, size = sequence.num_scheduled, self._block_size
        if num_tokens != 1 or start % size == 0 or sequence.state is not State.RUNNING:
            super().place(sequence, num_tokens, draft_token_ids)
            return
        end, known = start + 1, len(sequence.tokens)
        token_id = self._token if start < known else -1
        sample = end == known + sequence.num_pending
        step = SequenceStep(sequence.seq_id, start, 1, self._kv.no_blocks, token_id, sample)
        self.add(sequence, step, end)
        if end % size == 0:
            self._kv.publish_blocks(sequence)


class SkippingScheduler(Scheduler):
    """Does rounds of decode steps in one go, where a round schedules one step and updates the oldest one.

    It is for executors whose results are known before: every token is the same, and it ends no sequence. So `update`
    has outputs only for first and last tokens. It warns of no preemption.
    """

    def __init__(
        self,
        limits: StepLimits,
        cache: CachePlan,
        num_blocks: int,
        max_model_len: int,
        *,
        max_in_flight: int,
        stages: int,
        token: int,
        skips: bool = True,
    ) -> None:
        """`stages` are those of the pipeline, and `token` is what every step samples.

        Without `skips` it works as its base class, so that tests can compare.
        """
        self._token, self._block_size, self._skips = token, cache.block_size, skips
        super().__init__(
            limits,
            cache,
            num_blocks,
            max_model_len,
            max_in_flight=max_in_flight,
            last_token_known=stages > 1,
            warns=False,
        )
        windows = {group.window for group in cache.groups if group.window is not None}
        self._has_windows = bool(windows)
        self._offsets = sorted({offset % cache.block_size for offset in (0, *windows)})
        """Lengths, modulo the block size, at which a block of a sequence is full or leaves a window."""

    def _make_builder(self, max_tokens: int) -> PlanBuilder:
        if not self._skips:
            return super()._make_builder(max_tokens)
        return _QuickBuilder(self, max_tokens, self._token, self._block_size)

    def _apply(
        self, sequence: LiveSequence, step: SequenceStep, result: SequenceResult | None, planned: float, now: float
    ) -> SequenceOutput | None:
        """See the base class. Results are not looked at, and a token between the first and the last has no output."""
        known = len(sequence.tokens) + 1
        if (
            not self._skips
            or not step.sample
            or step.num_tokens != 1
            or sequence.state is not State.RUNNING
            or known >= sequence.limit
            or sequence.recorder.awaits_token
            or self._has_windows
        ):
            return super()._apply(sequence, step, result, planned, now)
        sequence.num_in_flight -= 1
        sequence.num_computed = step.start + 1
        sequence.num_pending -= 1
        sequence.tokens.append(self._token)
        self.registry.totals.generation_tokens += 1
        if known % self._block_size == 0:
            self.kv.publish_blocks(sequence)
        return None

    @property
    def kv_blocks_used(self) -> int:
        return self.kv.pool.num_used

    @property
    def oldest_plan(self) -> StepPlan:
        """The plan in flight whose result comes next."""
        return self.in_flight[0].plan

    def skip_decodes(self, advance: Callable[[int, int, int], int]) -> int:
        """Do the next rounds at once, if all they do is to step every running sequence by one token.

        `advance(sequences, tokens of their contexts, most rounds)` moves the clock, and returns for how many rounds.
        No sequence ends in them, none starts, and no block is lacking. Returns the number of rounds, perhaps 0.
        """
        running = self.queues.running
        most = self._num_equal_rounds()
        if most < 1:
            return 0
        rounds = advance(len(running), sum(sequence.num_scheduled for sequence in running), most)
        self._move_blocks(rounds)
        plan, sequences, planned = self.in_flight.popleft()
        steps = [SequenceStep(step.seq_id, step.start + rounds, 1, [], -1, True) for step in plan.steps]
        self.in_flight.append(PlanInFlight(StepPlan(plan.step_id + rounds, [], steps, []), sequences, planned))
        self.num_steps += rounds
        self.queues.take_ends()
        self.registry.totals.generation_tokens += rounds * len(sequences)
        return rounds

    def _move_blocks(self, rounds: int) -> None:
        """Append tokens to all running sequences, and move their blocks as single rounds would, in the same order.

        Round r schedules position s + r - 1 of a sequence whose first s positions are scheduled now. Then it has the
        results up to position s + r - 2, and token s + r - 1.
        """
        size, kv, running = self._block_size, self.kv, self.queues.running
        starts = [sequence.num_scheduled for sequence in running]
        added = [self._token] * rounds
        events: list[tuple[int, bool, int]] = []
        for index, start in enumerate(starts):
            running[index].tokens += added
            events += [(number, False, index) for number in range(1 + -start % size, rounds + 1, size)]
            for offset in self._offsets:
                first = (offset - start) % size or size
                events += [(number, True, index) for number in range(first, rounds + 1, size)]
        events.sort()
        for number, is_update, index in events:
            sequence, end = running[index], starts[index] + number
            if not is_update:
                kv.grow_tables(sequence, end)
                continue
            sequence.num_computed, sequence.num_scheduled = end - 1, end
            kv.slide_windows(sequence)
            kv.publish_blocks(sequence)
        for sequence, start in zip(running, starts, strict=True):
            sequence.num_computed, sequence.num_scheduled = start + rounds - 1, start + rounds
            sequence.last_step += rounds

    def _num_equal_rounds(self) -> int:
        """The most rounds that `skip_decodes` may do."""
        running = self.queues.running
        if self.last_token_known or len(self.in_flight) != 1 or self.queues.draining or self.registry.has_outputs:
            return 0
        plan, sequences, _ = self.in_flight[0]
        if plan.starts or len(sequences) != len(running) or plan.num_tokens != len(running):
            return 0
        most = 1 << 30
        for sequence in running:
            known = len(sequence.tokens)
            if sequence.num_pending != 1 or sequence.num_scheduled != known or not sequence.num_output_tokens:
                return 0
            most = min(most, sequence.limit - known - 1)
        return self._bound_by_blocks(self._bound_by_waiting(most))

    def _bound_by_waiting(self, most: int) -> int:
        """Rounds in which the first waiting sequence is not looked at."""
        head = self.queues.waiting.peek()
        if head is None or len(self.queues.running) >= self.max_running:
            return most
        if self._has_windows or head.blocks_wanted <= self.kv.pool.num_free:
            return 0
        return min(most, head.next_lookup - self.num_steps)

    def _bound_by_blocks(self, most: int) -> int:
        """Rounds for which there are blocks."""
        free, size = self.kv.pool.num_free, self._block_size
        while most > 0:
            needed = sum(
                -(-(sequence.num_scheduled + most) // size) - len(sequence.kv.tables[0])
                for sequence in self.queues.running
            )
            if needed * self.kv.num_groups <= free:
                return most
            most //= 2
        return 0
