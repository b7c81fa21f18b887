"""Guesses from earlier answers, compared with a search by brute force."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from shardline.config.speculation import Speculation, Suffixes
from shardline.engine.scheduling.sequence import KVState, LiveSequence
from shardline.engine.speculative.suffix import Answers, SuffixLookup, SuffixProposer
from shardline.engine.speculative.suffix_index import SuffixIndex
from tests.engine.fake_worker import make_request

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=4)
MINE, OTHER = ("", "mine"), ("", "other")


def contains(text: Sequence[int], part: Sequence[int]) -> bool:
    return any(list(text[place : place + len(part)]) == list(part) for place in range(len(text) - len(part) + 1))


def longest_match(texts: Sequence[Sequence[int]], tokens: Sequence[int]) -> int:
    return max((n for n in range(1, len(tokens) + 1) for text in texts if contains(text, tokens[-n:])), default=0)


@given(TEXTS, st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4))
def test_the_longest_suffix_is_found(texts: list[list[int]], tokens: list[int], most: int) -> None:
    """Also by a reader that began before the texts came."""
    index = SuffixIndex()
    early = 0, 0
    whole: list[list[int]] = []
    turns = [*([text] for text in texts), []]
    for count, turn in enumerate(turns):
        part = tokens[count * len(tokens) // len(turns) : (count + 1) * len(tokens) // len(turns)]
        for text in turn:
            for place, token in enumerate(text):
                index.append(token)
                assert index.step(0, token) > 0
                if place == len(text) // 2 and part:
                    early = index.follow(*early, part.pop(0))
            index.end_text()
            whole.append(text)
        for token in part:
            early = index.follow(*early, token)
    state, length = 0, 0
    for token in tokens:
        state, length = index.follow(state, length, token)
    assert length == longest_match(whole, tokens)
    assert early[1] <= length
    if length:
        found = index.find_continuation(state, most)
        assert any(contains(text, [*tokens[-length:], *found]) for text in whole)
        assert len(found) == most or any(
            text[len(text) - length - len(found) :] == tokens[-length:] + found for text in whole
        )


@given(st.lists(st.integers(0, 1), min_size=1, max_size=24))
def test_a_reader_follows_a_text_that_grows(tokens: list[int]) -> None:
    index = SuffixIndex()
    state, length = 0, 0
    for place, token in enumerate(tokens):
        state, length = index.follow(state, length, token)
        assert length <= longest_match([tokens[:place]], tokens[: place + 1])
        if length:
            assert contains(tokens[:place], tokens[place + 1 - length : place + 1])
        index.append(token)


def fill(answers: Answers, *texts: Sequence[int], namespace: tuple[str, str] = MINE) -> None:
    for text in texts:
        answers.add(namespace, text)
    answers.index(1 << 30)


def lookup(answers: Answers, namespace: tuple[str, str] = MINE, **options: float) -> SuffixLookup:
    return SuffixLookup(Suffixes(**options), answers, namespace)  # type: ignore[arg-type]


def test_the_longest_match_counts_wherever_it_is() -> None:
    answers = Answers(100)
    fill(answers, [1, 2, 3, 4, 5, 6])
    assert lookup(answers).find_continuation([9, 2, 3, 7, 2, 3], 4) == [7, 2]
    assert lookup(answers).find_continuation([9, 2, 3, 7, 1, 2, 3], 4) == [4, 5, 6]
    assert lookup(answers, max_tree_depth=2).find_continuation([9, 2, 3, 7, 1, 2, 3], 4) == [7, 1]
    assert lookup(answers, max_spec_factor=0.5).find_continuation([1, 2, 3, 4], 4) == [5, 6]
    assert lookup(answers).find_continuation([7, 8], 4) == []
    followed = lookup(answers)
    assert followed.find_continuation([1], 4) == [2]
    assert followed.find_continuation([1, 2, 3], 4) == [4, 5, 6]
    assert followed.find_continuation([1, 2, 3, 8, 9, *range(20, 50), 3, 4], 4) == [5, 6]


def test_a_namespace_knows_its_own_answers_only() -> None:
    answers = Answers(100)
    fill(answers, [1, 2, 3])
    fill(answers, [1, 2, 4], namespace=OTHER)
    assert lookup(answers).find_continuation([1, 2], 4) == [3]
    assert lookup(answers, OTHER).find_continuation([1, 2], 4) == [4]
    assert lookup(answers, ("salt", "mine")).find_continuation([1, 2], 4) == []


def test_few_answers_are_kept_and_the_latest_stay() -> None:
    for most in (1, 2, 3, 10):
        answers = Answers(most)
        fill(answers, *([number, number] for number in range(100, 130)))
        kept = [number for number in range(100, 130) if lookup(answers).find_continuation([number], 1)]
        assert most // 2 <= len(kept) <= most
        assert kept[-1] == 129
    answers = Answers(0)
    fill(answers, [1, 2])
    assert lookup(answers).find_continuation([1], 1) == []


def test_memory_is_bounded_and_counted() -> None:
    most_bytes = 1 << 20
    text = [(number * number + number // 7) % 997 for number in range(6000)]
    tracemalloc.start()
    try:
        answers = Answers(10**6, most_bytes)
        for start in range(0, len(text), 100):
            fill(answers, text[start : start + 100], namespace=("", str(start % 7)))
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    counted = sum(index.num_bytes for generation in answers.generations for index in generation.values())
    assert 0.6 * counted < size < 1.1 * counted
    assert most_bytes / 2 < counted < 1.1 * most_bytes
    assert lookup(answers, ("", str(5900 % 7))).find_continuation(text[5900:5905], 3) == text[5905:5908]


def test_answers_of_one_owner_help_that_owner() -> None:
    def first_draft(share: bool, owner: str) -> list[int]:
        proposer = SuffixProposer(Speculation(6, 0, 0, Suffixes(share=share)))
        ended = make_request("a", [50, 51], owner="me")
        proposer.note_end(LiveSequence(ended, 100, (0, 0.0, 0), [50, 51, 1, 2, 3, 4, 5], KVState([[]], [0])))
        request = make_request("b", [60, 1, 2, 3], owner=owner)
        sequence = LiveSequence(request, 100, (0, 0.0, 0), list(request.prompt_token_ids), KVState([[]], [0]))
        proposer.begin_plan(1)
        for _ in range(4):
            proposer.note_decode(1, 1, 1, 1.0)
        return proposer.propose(sequence, 64)

    assert first_draft(False, "me")[:1] == [4]
    assert first_draft(False, "you") == []
    assert first_draft(True, "you")[:1] == [4]
