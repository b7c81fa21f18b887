"""Which expert moves where: the load of each expert in, the best next move out. Nothing here waits or sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardline.models.partition import split_dim

_ENOUGH = 1.05
"""Load of the busiest rank over the mean below which nothing moves."""
_CHANCE = 3.0
"""Standard deviations of the load of a rank, if tokens chose at random, that are no reason to move anything."""
_POWER = 8
"""Of the loads in the sum that moves make smaller: nearly the largest load, but a tie of two ranks is no dead end."""
_GAIN = 0.99
"""What a move leaves of that sum at most."""

Load = npt.NDArray[np.float64]


class Move(NamedTuple):
    """A change that all ranks of a layer make between two steps."""

    layer: int
    changes: tuple[tuple[int, int], ...]
    """(place, expert): what is in which place afterwards."""


class LayerPlaces:
    """The experts in the places of one layer, which ranks share; see `runtime.layers.expert_places`."""

    def __init__(self, num_experts: int, num_places: int, num_ranks: int) -> None:
        self.experts = np.arange(num_places) % num_experts
        """The expert in each place."""
        self.num_experts = num_experts
        spans = split_dim(num_places, num_ranks)
        self._ranks = np.repeat(np.arange(num_ranks), [span.size for span in spans])
        """The rank of each place."""
        self._num_ranks = num_ranks

    def put(self, changes: Sequence[tuple[int, int]]) -> None:
        """Note a move."""
        for place, expert in changes:
            self.experts[place] = expert

    def rank_load(self, load: Load) -> Load:
        """The load of each rank, if each expert has `load` [num_experts] and its copies share it evenly."""
        shares = (load / self._copies)[self.experts]
        return np.bincount(self._ranks, shares, minlength=self._num_ranks).astype(np.float64)

    def imbalance(self, load: Load) -> float:
        """The busiest rank's load over the mean; 1 is even."""
        loads = self.rank_load(load)
        return float(loads.max() / loads.mean()) if loads.sum() else 1.0

    def needs_move(self, load: Load) -> bool:
        """Whether the busiest rank has more to do than the others, beyond chance; `load` is in tokens."""
        mean = load.sum() / self._num_ranks
        return bool(mean > 0 and self.imbalance(load) > _ENOUGH + _CHANCE / np.sqrt(mean))

    def best_changes(self, load: Load) -> tuple[tuple[int, int], ...]:
        """The swap of two experts, or the copy of one in the place of another's copy, that helps the busiest rank most;
        empty: none helps enough."""
        loads = self.rank_load(load)
        busiest, mean = int(loads.argmax()), loads.mean()
        before = ((loads / mean) ** _POWER).sum()
        swapped, swap = self._best_swap(load, loads, busiest)
        copied, copy = self._best_copy(load, loads, busiest)
        after, changes = min((swapped, swap), (copied, copy), key=lambda option: option[0])
        return changes if after <= _GAIN * before else ()

    @property
    def _copies(self) -> npt.NDArray[np.int64]:
        """How many places have each expert."""
        return np.bincount(self.experts, minlength=self.num_experts)

    def _holds(self) -> npt.NDArray[np.int64]:
        """[num_experts, num_ranks]: how many copies each rank has."""
        holds = np.zeros((self.num_experts, self._num_ranks), dtype=np.int64)
        np.add.at(holds, (self.experts, self._ranks), 1)
        return holds

    def _best_swap(self, load: Load, loads: Load, busiest: int) -> tuple[float, tuple[tuple[int, int], ...]]:
        """(the sum of powers afterwards, the changes)"""
        holds, mean = self._holds(), loads.mean()
        own, other = np.flatnonzero(self._ranks == busiest), np.flatnonzero(self._ranks != busiest)
        shares = (load / self._copies)[self.experts]
        moved = shares[own][:, None] - shares[other][None, :]
        ranks = self._ranks[other]
        powers = (loads / mean) ** _POWER
        after = powers.sum() - powers[busiest] - powers[ranks][None, :]
        after = after + ((loads[busiest] - moved) / mean) ** _POWER + ((loads[ranks][None, :] + moved) / mean) ** _POWER
        # Two copies of an expert on one rank are of no use.
        twice = holds[self.experts[own]][:, ranks] + holds[self.experts[other], busiest][None, :] > 0
        after = np.where(twice, np.inf, after)
        row, column = np.unravel_index(int(after.argmin()), after.shape)
        first, second = int(own[row]), int(other[column])
        changes = ((first, int(self.experts[second])), (second, int(self.experts[first])))
        return float(after[row, column]), changes

    def _best_copy(self, load: Load, loads: Load, busiest: int) -> tuple[float, tuple[tuple[int, int], ...]]:
        """The same for a further copy of the expert that keeps the busiest rank busiest."""
        holds, copies, mean = self._holds(), self._copies, loads.mean()
        own = self.experts[self._ranks == busiest]
        expert = int(own[(load / copies)[own].argmax()])
        spare = np.flatnonzero((copies[self.experts] > 1) & (holds[expert][self._ranks] == 0))
        if not len(spare):
            return np.inf, ()
        lost, ranks = self.experts[spare], self._ranks[spare]
        share = load[expert] / (copies[expert] + 1)
        left = loads - holds[expert] * (load[expert] / copies[expert] - share)
        # The other copies of what is lost take over its load.
        grown = load[lost] / (copies[lost] - 1)
        after = left[None, :] + holds[lost] * (grown - load[lost] / copies[lost])[:, None]
        after[np.arange(len(spare)), ranks] += share - grown
        powers = ((after / mean) ** _POWER).sum(axis=1)
        best = int(powers.argmin())
        return float(powers[best]), ((int(spare[best]), expert),)
