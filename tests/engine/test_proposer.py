"""How long drafts are, and how often there is one."""

from __future__ import annotations

from shardline.config.speculation import Speculation
from shardline.engine.scheduling.sequence import KVState, LiveSequence
from shardline.engine.speculative.ngram import NgramProposer
from shardline.messages.request import Constraints, Request
from shardline.messages.step import SequenceResult, SequenceStep
from tests.engine.fake_worker import make_request

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8] * 4


def sequence_of(request: Request, limit: int = 100) -> LiveSequence:
    return LiveSequence(request, limit, (0, 0.0, 0), list(request.prompt_token_ids), KVState([[]], [0]))


def draft_of(proposer: NgramProposer, sequence: LiveSequence, num_accepted: int, most: int = 64) -> int:
    """Tokens of a draft, of which so many are accepted."""
    guesses = proposer.propose(sequence, most)
    if guesses:
        start = len(sequence.tokens) - 1
        step = SequenceStep(0, start, 1 + len(guesses), [[]], -1, True, False, guesses)
        proposer.note_result(sequence, step, SequenceResult(0, [9] * (1 + min(num_accepted, len(guesses)))))
    return len(guesses)


def test_drafts_are_as_long_as_they_are_right() -> None:
    proposer, sequence = NgramProposer(Speculation(6, 1, 2)), sequence_of(make_request("r", PROMPT))
    assert [draft_of(proposer, sequence, right) for right in (6, 3, 2, 3, 6, 0, 1)] == [6, 6, 4, 3, 6, 6, 1]
    assert proposer.stats().num_tokens == 32
    assert proposer.stats().accepted == [6, 5, 4, 2, 2, 2]


def test_wrong_drafts_become_rare() -> None:
    proposer, sequence = NgramProposer(Speculation(6, 1, 2)), sequence_of(make_request("r", PROMPT))
    lengths = [draft_of(proposer, sequence, 0) for _ in range(200)]
    assert lengths[:10] == [6, 1, 0, 1, 0, 0, 0, 1, 0, 0]
    assert sum(map(bool, lengths)) == 11
    assert draft_of(proposer, sequence, 1) == 0
    while not draft_of(proposer, sequence, 1):
        pass
    assert draft_of(proposer, sequence, 2) == 2


def test_limits_of_drafts() -> None:
    proposer = NgramProposer(Speculation(6, 1, 2))
    assert draft_of(proposer, sequence_of(make_request("r", PROMPT)), 0, most=2) == 2
    assert draft_of(proposer, sequence_of(make_request("r", PROMPT)), 0, most=0) == 0
    # With two tokens to go, one of a draft and one that is sampled behind it.
    assert draft_of(proposer, sequence_of(make_request("r", PROMPT), limit=len(PROMPT) + 2), 0) == 1
    assert draft_of(proposer, sequence_of(make_request("r", PROMPT), limit=len(PROMPT) + 1), 0) == 0
    constrained = make_request("r", PROMPT, constraints=Constraints(bad_words=((9,),)))
    assert draft_of(proposer, sequence_of(constrained), 0) == 0
