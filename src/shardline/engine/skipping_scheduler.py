"""A scheduler for simulations: it does many equal decode steps at once, and the others with less work."""

from __future__ import annotations

from collections.abc import Callable

from shardline.deployment.deployment import CachePlan, StepLimits
from shardline.engine.preemption import PreemptionLog
from shardline.engine.scheduler import Draft, Scheduler
from shardline.engine.sequence import LiveSequence, State
from shardline.types import SequenceOutput, SequenceResult, SequenceStep, StepPlan


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
        super().__init__(
            limits,
            cache,
            num_blocks,
            max_model_len,
            max_in_flight=max_in_flight,
            last_token_known=stages > 1,
            preemptions=PreemptionLog(warns=False),
        )
        self._token = token
        self._skips = skips
        windows = {group.window for group in cache.groups if group.window is not None}
        self._has_windows = bool(windows)
        self._offsets = sorted({offset % cache.block_size for offset in (0, *windows)})
        """Lengths, modulo the block size, at which a block of a sequence is full or leaves a window."""
        self._no_blocks: list[list[int]] = [[] for _ in cache.groups]

    @property
    def kv_blocks_used(self) -> int:
        """Blocks that sequences hold."""
        return self._kv.pool.num_used

    @property
    def oldest_plan(self) -> StepPlan:
        """The plan in flight whose result comes next."""
        return self._in_flight[0][0]

    def skip_decodes(self, advance: Callable[[int, int, int], int]) -> int:
        """Do the next rounds at once, if all they do is to step every running sequence by one token.

        `advance(sequences, tokens of their contexts, most rounds)` moves the clock, and returns for how many rounds.
        No sequence ends in them, none starts, and no block is lacking. Returns the number of rounds, perhaps 0.
        """
        most = self._num_equal_rounds()
        if most < 1:
            return 0
        rounds = advance(
            len(self._queues.running), sum(sequence.num_scheduled for sequence in self._queues.running), most
        )
        self._move_blocks(rounds)
        plan, sequences, planned = self._in_flight.popleft()
        steps = [SequenceStep(step.seq_id, step.start + rounds, 1, [], -1, True) for step in plan.steps]
        self._in_flight.append((StepPlan(plan.step_id + rounds, [], steps, []), sequences, planned))
        self._num_steps += rounds
        self._queues.take_ends()
        self._registry.totals.generation_tokens += rounds * len(sequences)
        return rounds

    def _place(self, draft: Draft, sequence: LiveSequence, num_tokens: int) -> None:
        """See the base class. A decode step within a block needs no further block, and asks for no scores."""
        start = sequence.num_scheduled
        if num_tokens != 1 or start % self._block_size == 0 or sequence.state is not State.RUNNING or not self._skips:
            super()._place(draft, sequence, num_tokens)
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
        if end % self._block_size == 0:
            self._kv.publish_blocks(sequence)

    def _apply_step(
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
            or not self._skips
        ):
            return super()._apply_step(sequence, step, result, planned, now)
        sequence.num_in_flight -= 1
        sequence.num_computed = step.start + 1
        sequence.num_pending -= 1
        sequence.tokens.append(self._token)
        self._registry.totals.generation_tokens += 1
        if known % self._block_size == 0:
            self._kv.publish_blocks(sequence)
        return None

    def _move_blocks(self, rounds: int) -> None:
        """Append tokens to all running sequences, and move their blocks as single rounds would, in the same order.

        Round r schedules position s + r - 1 of a sequence whose first s positions are scheduled now. Then it has the
        results up to position s + r - 2, and token s + r - 1.
        """
        size, running = self._block_size, self._queues.running
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
                self._kv.grow_tables(sequence, end)
                continue
            sequence.num_computed, sequence.num_scheduled = end - 1, end
            self._kv.slide_windows(sequence)
            self._kv.publish_blocks(sequence)
        for sequence, start in zip(running, starts, strict=True):
            sequence.num_computed, sequence.num_scheduled = start + rounds - 1, start + rounds
            sequence.last_step += rounds

    def _num_equal_rounds(self) -> int:
        """The most rounds that `skip_decodes` may do."""
        if self._last_token_known or len(self._in_flight) != 1 or self._queues.draining or self._registry.has_outputs:
            return 0
        plan, sequences, _ = self._in_flight[0]
        running = self._queues.running
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
        head = self._queues.waiting.peek()
        if head is None or len(self._queues.running) >= self._max_running:
            return most
        if self._has_windows or head.blocks_wanted <= self._kv.pool.num_free:
            return 0
        return min(most, head.next_lookup - self._num_steps)

    def _bound_by_blocks(self, most: int) -> int:
        """Rounds for which there are blocks."""
        free, size = self._kv.pool.num_free, self._block_size
        while most > 0:
            needed = sum(
                -(-(sequence.num_scheduled + most) // size) - len(sequence.kv.tables[0])
                for sequence in self._queues.running
            )
            if needed * len(self._groups) <= free:
                return most
            most //= 2
        return 0
