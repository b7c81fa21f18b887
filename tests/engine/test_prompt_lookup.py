"""Drafts from earlier occurrences, compared with a search by brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardline.engine.speculative.ngram import PromptLookup


def brute_force(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    for count in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - count - 1, -1, -1):
            if tokens[start : start + count] == tokens[-count:]:
                return tokens[start + count : start + count + most]
    return []


@given(
    st.lists(st.lists(st.sampled_from([0, 1, 2, 0xD800, 0x10FFFF]), max_size=12), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_lookup(pieces: list[list[int]], shortest: int, more: int, most: int) -> None:
    lookup = PromptLookup(shortest, shortest + more)
    tokens: list[int] = []
    for piece in pieces:
        tokens += piece
        assert lookup.find_continuation(tokens, most) == brute_force(tokens, shortest, shortest + more, most)


def test_the_latest_occurrence_counts() -> None:
    lookup = PromptLookup(1, 2)
    assert lookup.find_continuation([1, 2, 3, 1, 2, 4, 5, 1, 2], 2) == [4, 5]
    assert lookup.find_continuation([1, 2, 3, 1, 2, 4, 5, 1, 2, 3], 3) == [1, 2, 4]
