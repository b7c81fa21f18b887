"""How the sequences of a step attend to keys that ranks share."""

from __future__ import annotations

import sys
import threading
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardline.runtime.key_share import KeyShare, SharedGroup, share_rows
from shardline.runtime.layers import context_parallel

SEQUENCES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9000)), min_size=1, max_size=12)
"""(new tokens, tokens before them) of each."""


@given(SEQUENCES, st.integers(2, 5), st.sampled_from([None, 100, 600, 3000]), st.integers(0, 20))
def test_runs_have_every_split_that_a_row_sees(
    sequences: list[tuple[int, int]], ranks: int, window: int | None, most: int
) -> None:
    lens = [new for new, _ in sequences]
    totals = [new + before for new, before in sequences]
    share = KeyShare(0, ranks, 16, (SharedGroup(window, most),))
    runs = share.plan_rows(lens, totals, 0)
    assert runs[0].first_sequence == runs[0].first_row == 0
    assert (runs[-1].end_sequence, runs[-1].end_row) == (len(lens), sum(lens))
    for before, run in pairwise(runs):
        assert (before.end_sequence, before.end_row) == (run.first_sequence, run.first_row)
    for run in runs:
        own = range(run.first_sequence, run.end_sequence)
        assert run.num_rows == sum(lens[index] for index in own)
        assert run.brings_keys == any(lens[index] > most for index in own)
        for index in own:
            first_key = 0 if window is None else max(0, sequences[index][1] - window + 1)
            assert run.first_split <= first_key // 512
            assert (run.first_split + run.num_splits) * 512 >= totals[index]
        if run.brings_keys:
            assert len(own) == 1
        else:
            assert run.first_split % ranks == 0, "its first split is of the first rank"
            assert run.num_splits <= ranks or run.num_splits % ranks == 0
    blocks = torch.arange(len(lens))[:, None]
    [(found, tables)] = share_rows([runs], lens, [blocks], torch.tensor(totals))
    for run, of_run in zip(found, tables, strict=True):
        starts = of_run.starts.tolist()
        assert starts[0] == 0
        assert [b - a for a, b in pairwise(starts)] == lens[run.first_sequence : run.end_sequence]
        assert of_run.lens.tolist() == totals[run.first_sequence : run.end_sequence]
        assert of_run.blocks[:, 0].tolist() == list(range(run.first_sequence, run.end_sequence))


def test_a_sequence_with_keys_in_one_split_gets_results_of_one_rank() -> None:
    share = KeyShare(1, 3, 16, (SharedGroup(None, 100),))
    [run] = share.plan_rows([1] * 8, [512, 3, 500, 17, 1, 9, 100, 40], 0)
    assert (run.first_split, run.num_splits) == (0, 1)


def test_only_keys_of_own_splits_are_stored() -> None:
    share = KeyShare(1, 3, 16, (SharedGroup(None, 1),))
    positions = torch.tensor([0, 511, 512, 1023, 1024, 2047, 2048, 2559, 2560])
    slots = torch.arange(9)
    share.mask_slots(slots, positions)
    assert slots.tolist() == [-1, -1, 2, 3, -1, -1, 6, 7, -1]


def test_threads_that_record_at_once_keep_the_same_counts() -> None:
    """A recorded step keeps the address only, so that no other tensor may take the place of one that was returned."""
    found: list[list[torch.Tensor]] = []
    start = threading.Barrier(4)

    def record() -> None:
        start.wait()
        found.append([context_parallel._counts(2, (number, 3)) for number in range(10_000, 10_500)])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=record) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 4
    for number, same in enumerate(zip(*found, strict=True)):
        assert len({id(counts) for counts in same}) == 1
        assert same[0].tolist() == [[10_000 + number, 3], [10_000 + number, 3]]
