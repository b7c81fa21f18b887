"""Which expert moves where."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from shardline.engine.expert_balance import LayerPlaces
from shardline.models.partition import split_dim


def settle(places: LayerPlaces, load: np.ndarray) -> int:
    """Make the best moves until none helps; returns how many."""
    for count in itertools.count():
        changes = places.best_changes(load)
        if not changes:
            return count
        places.put(changes)
    raise AssertionError


@given(
    st.integers(2, 5),
    st.lists(st.integers(0, 1000), min_size=5, max_size=12).filter(any),
    st.integers(0, 4),
)
def test_moves_end_and_every_expert_keeps_a_place(num_ranks: int, load: list[int], redundant: int) -> None:
    places = LayerPlaces(len(load), len(load) + redundant, num_ranks)
    before = places.imbalance(np.array(load, dtype=np.float64))
    settle(places, np.array(load, dtype=np.float64))
    assert set(places.experts) == set(range(len(load)))
    assert places.imbalance(np.array(load, dtype=np.float64)) <= before + 1e-9
    assert np.isclose(places.rank_load(np.array(load, dtype=np.float64)).sum(), sum(load))


@given(st.lists(st.integers(0, 50), min_size=6, max_size=8).filter(any))
def test_swaps_over_two_ranks_come_near_the_best_division(load: list[int]) -> None:
    weights = np.array(load, dtype=np.float64)
    places = LayerPlaces(len(load), len(load), 2)
    settle(places, weights)
    first = split_dim(len(load), 2)[0].size
    best = min(
        max(sum(weights[list(some)]), weights.sum() - sum(weights[list(some)]))
        for some in itertools.combinations(range(len(load)), first)
    )
    # A single swap cannot always go on, but then what is left is less than the lightest pair that could be exchanged.
    assert places.rank_load(weights).max() <= 1.25 * best


def test_copies_make_a_skewed_load_even() -> None:
    """Zipf's law over 64 experts and 8 ranks: swaps alone cannot divide the most popular expert."""
    load: npt.NDArray[np.float64] = 1e6 / np.arange(1, 65, dtype=np.float64) ** 1.1
    alone, copied = LayerPlaces(64, 64, 8), LayerPlaces(64, 80, 8)
    assert alone.imbalance(load) > 3.0
    settle(alone, load)
    settle(copied, load)
    heaviest = load.max() + np.sort(load)[:7].sum()
    assert alone.imbalance(load) < 1.02 * heaviest / (load.sum() / 8)
    assert copied.imbalance(load) < 1.1
    holds = copied._holds()
    assert holds[0].max() == 1  # two copies on one rank would be of no use


def test_chance_and_small_differences_move_nothing() -> None:
    places = LayerPlaces(4, 4, 2)
    assert not places.needs_move(np.array([6.0, 5.0, 4.0, 5.0]))  # 11 against 9 tokens
    assert not places.needs_move(np.array([5100.0, 5100.0, 4900.0, 4900.0]))
    assert places.needs_move(np.array([6000.0, 6000.0, 4000.0, 4000.0]))
    assert not places.needs_move(np.zeros(4))
