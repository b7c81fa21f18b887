"""Whether drafts pay, in a model of step times: a row of guesses takes a part of a step, and so does a step that is not
planned ahead."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from shardline.config.speculation import DraftModel, Speculation
from shardline.engine.scheduling.sequence import KVState, LiveSequence
from shardline.engine.speculative.model import ModelProposer
from shardline.engine.speculative.payoff import Acceptance, Gate, Payoff
from shardline.engine.speculative.text_proposer import TextProposer
from shardline.messages.stats import DraftStats, merge_drafts
from shardline.messages.step import SequenceResult, SequenceStep
from tests.engine.fake_worker import make_request

WAIT = 0.03
NUM_TOKENS = 150
RIGHT, WRONG = 1, 0


class Text:
    """Guesses are found with one probability, and right with another one."""

    def __init__(self, dice: random.Random, found: float, right: float) -> None:
        self._dice, self._found, self._right = dice, found, right

    def find_continuation(self, tokens: Sequence[int], limit: int) -> list[int]:
        if self._dice.random() >= self._found:
            return []
        return [RIGHT if self._dice.random() < self._right else WRONG for _ in range(limit)]


def run(num_sequences: int, row: float, text: Text, num_batches: int = 2) -> float:
    """How many times as fast batches are, each until its last sequence ends, as without drafts."""
    proposer = TextProposer(Speculation(8, 1, 1), lambda sequence: text)
    dice, seconds = random.Random(1), 0.0
    for _ in range(num_batches):
        requests = [make_request(f"r{number}", [5], NUM_TOKENS) for number in range(num_sequences)]
        live = [LiveSequence(request, NUM_TOKENS + 1, (0, 0.0, 0), [5], KVState([[]], [0])) for request in requests]
        had_draft = False
        while live:
            waits = had_draft or any(proposer.wants(sequence) for sequence in live)
            for sequence in live:
                sequence.num_pending = 0 if waits else 1
            proposer.begin_plan(len(live))
            drafts = [proposer.propose(sequence, 8) for sequence in live]
            num_rows = len(live) + sum(map(len, drafts))
            had_draft = num_rows > len(live)
            step_seconds = (1.0 + row * (num_rows - len(live)) + WAIT * waits) * (1.0 + 0.05 * dice.random())
            num_sampled = 0
            for sequence, draft in zip(live, drafts, strict=True):
                found = [RIGHT] * (1 + [*draft, WRONG].index(WRONG))
                step = SequenceStep(0, 0, 1 + len(draft), [[]], -1, True, False, draft)
                proposer.note_result(sequence, step, SequenceResult(0, found))
                sequence.tokens += found
                num_sampled += len(found)
            proposer.note_decode(len(live), num_rows, num_sampled, step_seconds)
            seconds += step_seconds
            live = [sequence for sequence in live if len(sequence.tokens) < sequence.limit]
    return num_batches * NUM_TOKENS * 1.025 / seconds


@pytest.mark.slow
@pytest.mark.parametrize(("num_sequences", "rows"), [(1, (0.02, 0.4)), (8, (0.02, 0.12, 0.4)), (32, (0.01, 0.1))])
def test_drafts_never_make_a_batch_slower(num_sequences: int, rows: tuple[float, ...]) -> None:
    for row in rows:
        for found, right in ((1.0, 0.0), (0.3, 0.3), (0.5, 0.5), (0.3, 0.8), (1.0, 0.8)):
            gains = [run(num_sequences, row, Text(random.Random(seed), found, right)) for seed in range(3)]
            assert sum(gains) / 3 > 0.97, (num_sequences, row, found, right, gains)
            assert min(gains) > 0.94, (num_sequences, row, found, right, gains)


@pytest.mark.parametrize(
    ("num_sequences", "row", "least"), [(1, 0.02, 3.0), (1, 0.1, 2.0), (8, 0.02, 1.5), (32, 0.01, 1.05)]
)
def test_drafts_that_are_right_pay(num_sequences: int, row: float, least: float) -> None:
    assert run(num_sequences, row, Text(random.Random(0), 1.0, 0.8)) > least


def test_a_draft_is_as_long_as_one_sequence_is_fastest() -> None:
    for right in (0.3, 0.6, 0.9):
        for row in (0.02, 0.1, 0.3):
            speeds = [sum(right**k for k in range(count + 1)) / (1.0 + row * count) for count in range(65)]
            chosen = Acceptance(right, 1.0).best_length(row)
            assert speeds[chosen] > 0.95 * max(speeds)
            assert chosen <= speeds.index(max(speeds))


def test_a_gate_that_does_not_pay_opens_less_and_less() -> None:
    gate, opened = Gate(), list[int]()
    for step in range(1000):
        if gate.is_open and (not opened or opened[-1] < step - 20):
            opened.append(step)
        gate.note(1, 0.9, 1.0)
    gaps = [after - before for before, after in pairwise(opened)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 128
    while not gate.is_open:
        gate.note(1, 1.0, 1.0)
    assert sum(gate.note(1, 1.5, 1.0) for _ in range(1000)) == pytest.approx(1000 * 2 / 134, abs=3)


def test_what_a_guess_costs_is_told_by_the_number_of_sequences() -> None:
    payoff = Payoff(8)
    assert payoff.stats().row_seconds == {}
    for num_sequences, row in ((5, 0.02), (1, 0.0)):
        for _ in range(50):
            payoff.begin_plan(num_sequences)
            guesses = 2 * num_sequences if payoff.is_open else 0
            payoff.note_decode(num_sequences, num_sequences + guesses, num_sequences + guesses, 1.0 + row * guesses)
    found = payoff.stats()
    assert found.row_seconds == {4: pytest.approx(0.02), 1: 0.0}
    both = merge_drafts([found, DraftStats(0, 0, [0] * 8, {1: 0.5})])
    assert both is not None
    assert both.row_seconds == {4: pytest.approx(0.02), 1: 0.5}


def test_each_number_of_sequences_has_a_gate() -> None:
    """Drafts pay for one sequence, and not for eight."""
    payoff, num_open = Payoff(8), {1: 0, 8: 0}
    for step in range(400):
        count = 1 if step % 20 < 10 else 8
        payoff.begin_plan(count)
        num_open[count] += payoff.is_open
        drafts = payoff.is_open
        payoff.note_decode(
            count, count * (1 + drafts), count * (1 + drafts), (1.2 if count == 1 else 2.5) if drafts else 1.0
        )
    assert num_open[1] > 180
    assert num_open[8] < 60


def run_model(num_sequences: int, row: float, draft: float, right: float, prompt: int = 100) -> float:
    """How many times as fast batches are with a draft model as without one, prompts included. Its pass takes the part
    `draft` of a step, and each of its rows that part of a row."""
    proposer, seconds = ModelProposer(Speculation(5, 0, 0, draft=DraftModel("small"))), 0.0
    noise, dice = random.Random(1), random.Random(2)
    for _ in range(2):
        requests = [make_request(f"r{number}", [5] * prompt, NUM_TOKENS) for number in range(num_sequences)]
        live = [
            LiveSequence(one, NUM_TOKENS + prompt, (0, 0.0, 0), [5] * prompt, KVState([[]], [0])) for one in requests
        ]
        computed = dict.fromkeys(map(id, live), 0)
        seconds += num_sequences * prompt * row
        waits = False
        while live:
            for sequence in live:
                sequence.num_pending = 0 if waits else 1
            proposer.begin_plan(len(live))
            drafts = [proposer.propose(sequence, 8) for sequence in live]
            for sequence in live:
                sequence.num_pending = 0
            counts = [proposer.count_guesses(sequence, 8) for sequence in live]
            num_rows = len(live) + sum(map(len, drafts))
            step_seconds = 1.0 + row * (num_rows - len(live)) + WAIT * waits + draft * max(counts)
            for sequence, count in zip(live, counts, strict=True):
                if count:
                    step_seconds += draft * row * (len(sequence.tokens) - computed[id(sequence)] + count - 1)
                    computed[id(sequence)] = len(sequence.tokens)
            waits = num_rows > len(live) or any(counts)
            step_seconds *= 1.0 + 0.05 * noise.random()
            num_sampled = 0
            for sequence, guesses, count in zip(live, drafts, counts, strict=True):
                found = [RIGHT] * (1 + [*guesses, WRONG].index(WRONG))
                step = SequenceStep(0, 0, 1 + len(guesses), [[]], -1, True, False, guesses, num_guesses=count)
                made = [RIGHT if dice.random() < right else WRONG for _ in range(count)]
                proposer.note_result(sequence, step, SequenceResult(0, found, guesses=made))
                sequence.tokens += found
                num_sampled += len(found)
            proposer.note_decode(len(live), num_rows, num_sampled, step_seconds)
            seconds += step_seconds
            live = [sequence for sequence in live if len(sequence.tokens) < sequence.limit]
    return 2 * (NUM_TOKENS * 1.025 + num_sequences * prompt * row) / seconds


@pytest.mark.parametrize(("num_sequences", "rows"), [(1, (0.02, 0.1)), (8, (0.02, 0.1)), (32, (0.01, 0.03))])
def test_a_draft_model_never_makes_a_batch_slower(num_sequences: int, rows: tuple[float, ...]) -> None:
    """Not by more than 3% at its first prompts and steps, from which it learns what it costs."""
    for row in rows:
        for right in (0.0, 0.4, 0.8):
            assert run_model(num_sequences, row, 0.1, right) > 0.965, (num_sequences, row, right)


@pytest.mark.parametrize(("num_sequences", "row", "least"), [(1, 0.02, 2.0), (8, 0.02, 1.2), (32, 0.01, 1.1)])
def test_a_draft_model_that_is_right_pays(num_sequences: int, row: float, least: float) -> None:
    assert run_model(num_sequences, row, 0.03, 0.8) > least


@pytest.mark.parametrize(
    ("num_sequences", "row", "right", "least"),
    [(1, 0.02, 0.8, 1.5), (8, 0.05, 1.0, 0.97), (32, 0.012, 1.0, 0.97), (32, 0.025, 0.5, 0.97)],
)
def test_long_prompts_are_computed_late_only_where_that_pays(
    num_sequences: int, row: float, right: float, least: float
) -> None:
    """A head of a sixth of the model. Its guesses gain less than its prompts cost where a step is full already."""
    assert run_model(num_sequences, row, 1 / 6, right, prompt=1000) > least


def test_one_sequence_of_a_batch_shows_what_late_tokens_take() -> None:
    proposer = ModelProposer(Speculation(5, 0, 0, draft=DraftModel("small")))
    proposer.begin_plan(4)
    while not proposer._payoff.is_open:
        proposer.note_decode(4, 4, 4, 1.0)
    requests = [make_request(f"r{number}", [5] * 500, NUM_TOKENS) for number in range(4)]
    live = [LiveSequence(one, NUM_TOKENS + 500, (0, 0.0, 0), [5] * 500, KVState([[]], [0])) for one in requests]

    def asked() -> list[bool]:
        return [proposer.count_guesses(sequence, 8) > 0 for sequence in live]

    def end_step(seconds: float) -> None:
        for sequence in live:
            if proposer.wants(sequence):
                step = SequenceStep(0, 0, 1, [[]], -1, True, False, [], num_guesses=1)
                proposer.note_result(sequence, step, SequenceResult(0, [RIGHT]))
        proposer.note_decode(4, 4, 4, seconds)

    assert asked() == [False, False, False, False]  # a step shows how many sequences there are
    end_step(1.0)
    assert asked() == [True, False, False, False]
    end_step(50.0)
    assert proposer._payoff.late_seconds == pytest.approx(49.0 / 488)
    live[1].num_cached_tokens = 490
    assert asked() == [True, True, False, False]  # the others' prompts take longer than drafts can save
