"""A scheduler for simulations: it does many equal decode steps at once, and the others with less work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardline.deployment.deployment import CachePlan, StepLimits
from shardline.engine.placing import Draft, Placer
from shardline.engine.preemption import PreemptionLog
from shardline.engine.schedule_state import PlanInFlight, ScheduleState
from shardline.engine.scheduler import Scheduler
from shardline.engine.sequence import LiveSequence, State
from shardline.engine.step_results import ResultApplier
from shardline.messages.request import SequenceOutput
from shardline.messages.step import SequenceResult, SequenceStep, StepPlan


class QuickPlacer(Placer):
    """Places decode steps with less work; every token is the same one."""

    def __init__(self, state: ScheduleState, token: int) -> None:
        super().__init__(state)
        self._token = token
        self._no_blocks: list[list[int]] = [[] for _ in state.groups]

    def place(self, draft: Draft, sequence: LiveSequence, num_tokens: int, guesses: Sequence[int] = ()) -> None:
        """See the base class. A decode step within a block needs no further block, and asks for no scores."""
        start, size = sequence.num_scheduled, self.state.block_size
        if num_tokens != 1 or start % size == 0 or sequence.state is not State.RUNNING:
            super().place(draft, sequence, num_tokens, guesses)
            return
        end, known = start + 1, len(sequence.tokens)
        sample = end == known + sequence.num_pending
        token_id = self._token if start < known else -1
        draft.steps.append(SequenceStep(sequence.seq_id, start, 1, self._no_blocks, token_id, sample))
        draft.sequences.append(sequence)
        draft.budget -= 1
        sequence.num_scheduled = end
        sequence.num_pending += sample
        sequence.num_in_flight += 1
        sequence.last_step = draft.step_id
        if end % size == 0:
            self.state.kv.publish_blocks(sequence)


class QuickApplier(ResultApplier):
    """Applies results without looking at them; every token is the same one."""

    def __init__(self, state: ScheduleState, token: int) -> None:
        super().__init__(state)
        self._token = token
        self._has_windows = any(group.window is not None for group in state.groups)

    def apply(
        self, sequence: LiveSequence, step: SequenceStep, result: SequenceResult | None, planned: float, now: float
    ) -> SequenceOutput | None:
        """See the base class. A token between the first and the last one has no output."""
        known = len(sequence.tokens) + 1
        if (
            not step.sample
            or step.num_tokens != 1
            or sequence.state is not State.RUNNING
            or known >= sequence.limit
            or sequence.recorder.awaits_token
            or self._has_windows
        ):
            return super().apply(sequence, step, result, planned, now)
        sequence.num_in_flight -= 1
        sequence.num_computed = step.start + 1
        sequence.num_pending -= 1
        sequence.tokens.append(self._token)
        self.state.registry.totals.generation_tokens += 1
        if known % self.state.block_size == 0:
            self.state.kv.publish_blocks(sequence)
        return None


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
        state = ScheduleState(limits, cache, num_blocks, max_model_len, preemptions=PreemptionLog(warns=False))
        super().__init__(
            state,
            max_in_flight=max_in_flight,
            last_token_known=stages > 1,
            placer=QuickPlacer(state, token) if skips else None,
            applier=QuickApplier(state, token) if skips else None,
        )
        self._token = token
        windows = {group.window for group in cache.groups if group.window is not None}
        self._has_windows = bool(windows)
        self._offsets = sorted({offset % cache.block_size for offset in (0, *windows)})
        """Lengths, modulo the block size, at which a block of a sequence is full or leaves a window."""

    @property
    def kv_blocks_used(self) -> int:
        """Blocks that sequences hold."""
        return self.state.kv.pool.num_used

    @property
    def oldest_plan(self) -> StepPlan:
        """The plan in flight whose result comes next."""
        return self.state.in_flight[0].plan

    def skip_decodes(self, advance: Callable[[int, int, int], int]) -> int:
        """Do the next rounds at once, if all they do is to step every running sequence by one token.

        `advance(sequences, tokens of their contexts, most rounds)` moves the clock, and returns for how many rounds.
        No sequence ends in them, none starts, and no block is lacking. Returns the number of rounds, perhaps 0.
        """
        state, running = self.state, self.state.queues.running
        most = self._num_equal_rounds()
        if most < 1:
            return 0
        rounds = advance(len(running), sum(sequence.num_scheduled for sequence in running), most)
        self._move_blocks(rounds)
        plan, sequences, planned = state.in_flight.popleft()
        steps = [SequenceStep(step.seq_id, step.start + rounds, 1, [], -1, True) for step in plan.steps]
        state.in_flight.append(PlanInFlight(StepPlan(plan.step_id + rounds, [], steps, []), sequences, planned))
        state.num_steps += rounds
        state.queues.take_ends()
        state.registry.totals.generation_tokens += rounds * len(sequences)
        return rounds

    def _move_blocks(self, rounds: int) -> None:
        """Append tokens to all running sequences, and move their blocks as single rounds would, in the same order.

        Round r schedules position s + r - 1 of a sequence whose first s positions are scheduled now. Then it has the
        results up to position s + r - 2, and token s + r - 1.
        """
        size, kv, running = self.state.block_size, self.state.kv, self.state.queues.running
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
        state, running = self.state, self.state.queues.running
        if self.last_token_known or len(state.in_flight) != 1 or state.queues.draining or state.registry.has_outputs:
            return 0
        plan, sequences, _ = state.in_flight[0]
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
        head = self.state.queues.waiting.peek()
        if head is None or len(self.state.queues.running) >= self.state.max_running:
            return most
        if self._has_windows or head.blocks_wanted <= self.state.kv.pool.num_free:
            return 0
        return min(most, head.next_lookup - self.state.num_steps)

    def _bound_by_blocks(self, most: int) -> int:
        """Rounds for which there are blocks."""
        free, size = self.state.kv.pool.num_free, self.state.block_size
        while most > 0:
            needed = sum(
                -(-(sequence.num_scheduled + most) // size) - len(sequence.kv.tables[0])
                for sequence in self.state.queues.running
            )
            if needed * len(self.state.groups) <= free:
                return most
            most //= 2
        return 0
