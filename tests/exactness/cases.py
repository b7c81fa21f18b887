"""The axes of the exactness matrix, its full product, and a pairwise sample of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple


class Case(NamedTuple):
    """One way of computing the same requests."""

    family: str
    dtype: str
    tensor: int
    pipeline: int
    data: int
    batch: str
    """alone: one request after another; together: all at once; staggered: joining and leaving while others run."""
    prefill: str
    """whole: a prompt in one step; chunked: in pieces that follow from what else is in the step."""
    cache: str
    """off; cold: the first time; warm: the second time, prefixes are in the cache."""
    memory: str
    """roomy; tight: so few KV blocks that sequences are preempted."""
    quantization: str
    kv: str
    """Type of the KV cache."""

    @property
    def name(self) -> str:
        """For test ids."""
        layout = f"tp{self.tensor}-pp{self.pipeline}-dp{self.data}"
        return "-".join((self.family, self.dtype, layout, *self[5:]))

    @property
    def possible(self) -> bool:
        """Preemption needs several sequences at once; in a tight pool, windowed groups that grow together leave nothing
        of the first time in the prefix cache; the rest combines freely."""
        if self.memory != "tight":
            return True
        forgotten = self.family.startswith(("gemma2", "gemma3")) and (self.batch, self.cache) == ("together", "warm")
        return self.batch != "alone" and not forgotten


def axes(families: Sequence[str]) -> list[tuple[Any, ...]]:
    """The values of each field of Case."""
    return [
        tuple(families),
        ("float32", "bfloat16"),
        (1, 2, 3, 4),
        (1, 2, 3),
        (1, 2),
        ("alone", "together", "staggered"),
        ("whole", "chunked"),
        ("off", "cold", "warm"),
        ("roomy", "tight"),
        ("none", "int8", "int4"),
        ("auto", "int8"),
    ]


def full_product(families: Sequence[str]) -> list[Case]:
    """Every possible case."""
    return [case for case in itertools.starmap(Case, itertools.product(*axes(families))) if case.possible]


def pairwise_sample(families: Sequence[str], seed: int = 0) -> list[Case]:
    """Cases in which every two values of different axes meet at least once (greedy covering array)."""
    values = axes(families)
    rng = random.Random(seed)
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(values)), 2)
        for a in values[i]
        for b in values[j]
        if {a, b} != {"tight", "alone"}
    }
    cases: list[Case] = []
    while missing:
        i, a, j, b = min(missing, key=str)
        candidates = []
        for _ in range(50):
            choice = [rng.choice(axis) for axis in values]
            choice[i], choice[j] = a, b
            case = Case(*choice)
            if case.possible:
                candidates.append((len(missing & set(_pairs(case))), case))
        best = max(candidates, key=lambda candidate: candidate[0])[1]
        missing -= set(_pairs(best))
        cases.append(best)
    return cases


def _pairs(case: Case) -> list[tuple[int, Any, int, Any]]:
    return [(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(case)), 2)]
