"""How long drafts are, and how often there is one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardline.config.speculation import Speculation
from shardline.engine.scheduling.sequence import KVState, LiveSequence
from shardline.engine.speculative.payoff import PlainTimes, RowCost
from shardline.engine.speculative.proposer import Proposer, make_proposer
from shardline.messages.request import Constraints, Request
from shardline.messages.step import SequenceResult, SequenceStep
from tests.engine.fake_worker import make_request

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8] * 4


def sequence_of(request: Request, limit: int = 100) -> LiveSequence:
    return LiveSequence(request, limit, (0, 0.0, 0), list(request.prompt_token_ids), KVState([[]], [0]))


def ngram_proposer(seconds_of_row: float = 0.1) -> Proposer:
    """One that knows what steps take, without guesses and with some."""
    proposer = make_proposer(Speculation(6, 1, 2))
    assert proposer is not None
    for num_rows in (1,) * 4 + (2, 3, 6) * 2:
        proposer.note_decode(1, num_rows, num_rows, 1.0 + seconds_of_row * (num_rows - 1))
    return proposer


def step_with(proposer: Proposer, sequence: LiveSequence, num_accepted: int) -> int:
    """As `draft_of`, in a step whose time is noted."""
    length = draft_of(proposer, sequence, num_accepted)
    proposer.note_decode(1, 1 + length, 1 + min(num_accepted, length), 1.0 + 0.1 * length)
    return length


def draft_of(proposer: Proposer, sequence: LiveSequence, num_accepted: int, most: int = 64) -> int:
    """Tokens of a draft, of which so many are accepted."""
    proposer.begin_plan(1)
    guesses = proposer.propose(sequence, most)
    if guesses:
        start = len(sequence.tokens) - 1
        step = SequenceStep(0, start, 1 + len(guesses), [[]], -1, True, False, guesses)
        proposer.note_result(sequence, step, SequenceResult(0, [9] * (1 + min(num_accepted, len(guesses)))))
    return len(guesses)


def test_drafts_grow_while_they_are_right_and_shrink() -> None:
    proposer, sequence = ngram_proposer(), sequence_of(make_request("r", PROMPT))
    lengths = [draft_of(proposer, sequence, right) for right in (9, 9, 9, 0, 0, 0, 0)]
    assert lengths[0] < lengths[1] <= lengths[2] == 6
    assert lengths[3:] == sorted(lengths[3:], reverse=True)
    assert lengths[-1] < lengths[0]
    stats = proposer.stats()
    assert stats.num_tokens == sum(lengths)
    assert stats.num_accepted == sum(lengths[:3])


def test_drafts_that_do_not_pay_become_rare() -> None:
    proposer, sequence = ngram_proposer(), sequence_of(make_request("r", PROMPT))
    lengths = [step_with(proposer, sequence, 0) for _ in range(400)]
    tried = [step for step, length in enumerate(lengths) if length]
    assert sum(lengths[:10]) < 20
    assert all(after - before >= 16 for before, after in list(pairwise(tried))[-3:])
    assert len(tried) > 12, "it never gives up"
    assert set(lengths[tried[-4] :]) == {0, 1}
    # Others of the server begin with what is known of guesses, and a text that can be guessed again is noticed.
    other = sequence_of(make_request("other", PROMPT))
    assert [step_with(proposer, other, 9) for _ in range(20)].count(1) <= 1
    assert max(step_with(proposer, other, 9) for _ in range(300)) == 6


def test_drafts_are_shorter_where_rows_cost_more() -> None:
    lengths = []
    for seconds_of_row in (0.0, 0.1, 0.2, 1.0):
        proposer, sequence = ngram_proposer(seconds_of_row), sequence_of(make_request("r", PROMPT))
        lengths.append(draft_of(proposer, sequence, 2))
    assert lengths == [6, 3, 2, 0]


def test_the_cost_of_a_row_is_that_beside_steps_without_guesses() -> None:
    cost = RowCost()
    assert cost.of_row(1) == cost.of_row(32) == 0.1
    for _ in range(50):
        cost.note(1, 1, 10.0)
        cost.note(1, 3, 12.0)
        cost.note(8, 8, 20.0)
    cost.note(1, 1, 1000.0)  # the machine was busy with something else
    cost.note(1, 3, 1000.0)
    assert cost.of_row(1) == pytest.approx(0.1, rel=0.3)
    assert cost.of_row(7) == 0.1  # steps of 4 to 7 sequences with guesses have not been measured
    for _ in range(50):
        cost.note(8, 12, 60.0)
    assert cost.of_row(8) == 1.0


def test_the_first_step_of_a_shape_does_not_tell_how_long_steps_take() -> None:
    times = PlainTimes()
    for num_sequences, seconds in ((4, 1.0), (8, 3.0)):
        times.note(num_sequences, 50.0)  # it is recorded
        assert times.of(num_sequences) == (0.0 if num_sequences == 4 else 1.0)
        times.note(num_sequences, seconds)
        assert times.of(num_sequences) == seconds
    assert [times.of(count) for count in (1, 3, 6, 9)] == [0.0, pytest.approx(0.875), 2.0, 3.0]
    assert [times.knows(count) for count in (3, 4, 5)] == [False, True, True]
    for _ in range(20):
        times.note(8, 3.3)
        times.note(8, 2.9)
    assert times.of(8) == pytest.approx(2.95, abs=0.05)  # a step is held up, and never hurried
    for _ in range(60):
        times.note(8, 4.0)
    assert times.of(8) == pytest.approx(4.0, abs=0.01)


def test_a_sequence_runs_ahead_while_nothing_is_drafted() -> None:
    proposer, sequence = ngram_proposer(), sequence_of(make_request("r", [1, 2, 3, 4, 5]))
    waits = []
    for _ in range(24):
        waits.append(proposer.wants(sequence))
        assert proposer.propose(sequence, 64) == []  # no token was there before
    assert waits.count(True) < 10
    sequence = sequence_of(make_request("r", PROMPT))
    assert proposer.wants(sequence)
    sequence.num_pending = 1
    assert proposer.propose(sequence, 64) == []
    sequence.num_pending = 0
    assert proposer.propose(sequence, 64)


def test_limits_of_drafts() -> None:
    proposer = ngram_proposer()
    assert draft_of(proposer, sequence_of(make_request("r", PROMPT)), 0, most=2) == 2
    assert draft_of(proposer, sequence_of(make_request("r", PROMPT)), 0, most=0) == 0
    # With two tokens to go, one of a draft and one that is sampled behind it.
    assert draft_of(proposer, sequence_of(make_request("r", PROMPT), limit=len(PROMPT) + 2), 0) == 1
    assert draft_of(proposer, sequence_of(make_request("r", PROMPT), limit=len(PROMPT) + 1), 0) == 0


def test_a_grammar_gets_its_guesses_with_the_result() -> None:
    proposer = ngram_proposer()
    sequence = sequence_of(make_request("r", PROMPT, constraints=Constraints("grammar")))
    sequence.num_pending = 1
    assert not proposer.wants(sequence)
    assert proposer.propose(sequence, 64, [1, 2])[:2] == [3, 4]
    assert proposer.propose(sequence, 1, [1, 2]) == [3]
    sequence.limit = len(PROMPT) + 3
    assert proposer.propose(sequence, 64, [1, 2]) == []
