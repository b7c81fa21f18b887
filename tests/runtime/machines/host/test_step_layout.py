"""A step's tensors against what its plan says, one position at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardline import _cpu
from shardline.messages.step import RankStep, SequenceStart, SequenceStep, StepPlan
from shardline.runtime.key_share import KeyShare, SharedGroup
from shardline.runtime.machines.base import StepSizes
from shardline.runtime.machines.host.step_layout import StepLayout
from shardline.runtime.sequences import SequenceTable
from shardline.runtime.step import StepInput
from shardline.sampling_params import SamplingParams

BLOCK_SIZE, MAX_BLOCKS, NUM_GROUPS, MAX_SEQS = 4, 8, 2, 5

Shares = list[tuple[int, int, bool]]
"""Start, number of tokens and whether it is sampled, of each sequence."""


def token_of(seq_id: int, position: int) -> int:
    return 100 * seq_id + position


def block_of(group: int, seq_id: int, index: int) -> int:
    return 1000 * group + 20 * seq_id + index


def layout_of(table: SequenceTable, *, num_groups: int = NUM_GROUPS, reuses_memory: bool = True) -> StepLayout:
    sizes = StepSizes(MAX_SEQS, MAX_BLOCKS, num_groups, BLOCK_SIZE, hidden_size=1, dtype=torch.float32)
    return StepLayout(table, sizes, reuses_memory=reuses_memory)


def make(shares: Shares, *, reuses_memory: bool = True, greedy: bool = False) -> StepInput:
    """The step of sequences that take up rows in another order than they are stepped in."""
    table = SequenceTable(NUM_GROUPS, MAX_BLOCKS)
    layout = layout_of(table, reuses_memory=reuses_memory)
    steps: list[SequenceStep] = []
    for seq_id, (start, length, sample) in reversed(list(enumerate(shares))):
        tokens = [token_of(seq_id, position) for position in range(start + length)]
        table.start_sequence(SequenceStart(seq_id, tokens, len(tokens), SamplingParams(), 0, ()))
        num_blocks = -(-len(tokens) // BLOCK_SIZE)
        blocks = [[block_of(group, seq_id, index) for index in range(num_blocks)] for group in range(NUM_GROUPS)]
        steps.insert(0, SequenceStep(seq_id, start, length, blocks, -1, sample))
    counts = (sum(step.num_tokens for step in steps),), (sum(step.sample for step in steps),)
    sequences = [table.advance_sequence(step) for step in steps]
    return layout.make_step(RankStep(StepPlan(1, [], steps, []), *counts), sequences, greedy)


shares_of_steps = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 12), st.booleans()), min_size=1, max_size=MAX_SEQS + 2
)
shares_of_decodes = st.lists(st.tuples(st.integers(0, 31), st.just(1), st.just(True)), min_size=1, max_size=MAX_SEQS)


@given(shares_of_steps | shares_of_decodes, st.booleans())
def test_every_token_is_where_the_plan_says(shares: Shares, reuses_memory: bool) -> None:
    step = make(shares, reuses_memory=reuses_memory)
    places = [(seq_id, start + i) for seq_id, (start, length, _) in enumerate(shares) for i in range(length)]
    assert step.token_ids.tolist() == [token_of(*place) for place in places]
    rows = step.rows
    assert rows.positions.tolist() == [position for _, position in places]
    assert rows.context_lens.tolist() == [start + length for start, length, _ in shares]
    assert rows.query_starts.tolist() == [sum(length for _, length, _ in shares[:s]) for s in range(len(shares) + 1)]
    for group, (tables, slots) in enumerate(zip(rows.block_tables, rows.slots, strict=True)):
        for seq_id, (start, length, _) in enumerate(shares):
            blocks = [block_of(group, seq_id, index) for index in range(-(-(start + length) // BLOCK_SIZE))]
            assert tables[seq_id, : len(blocks)].tolist() == blocks
        assert slots.tolist() == [
            block_of(group, seq_id, position // BLOCK_SIZE) * BLOCK_SIZE + position % BLOCK_SIZE
            for seq_id, position in places
        ]


@given(shares_of_steps)
def test_the_last_tokens_of_some_sequences_are_sampled(shares: Shares) -> None:
    rows = make(shares).rows
    left = rows.narrow()
    chosen = [seq_id for seq_id, (_, _, sample) in enumerate(shares) if sample]
    if all(share[1:] == (1, True) for share in shares):
        assert left is rows
        return
    assert left.places is not None
    assert left.places.tolist() == [rows.query_starts[seq_id + 1] - 1 for seq_id in chosen]
    assert torch.equal(left.positions, left.take(rows.positions))
    assert left.query_starts.tolist() == list(range(len(chosen) + 1))
    assert torch.equal(left.context_lens, rows.context_lens[chosen])
    assert left.replicas == (len(chosen),)
    assert left.narrow() is left
    assert left.slots == ()
    for tables, all_tables in zip(left.block_tables, rows.block_tables, strict=True):
        assert torch.equal(tables, all_tables[chosen])


@pytest.mark.parametrize("reuses_memory", [True, False])
def test_a_decode_step_narrows_with_replicas_that_do_not_decode(reuses_memory: bool) -> None:
    """Another replica in lockstep computes ten tokens and samples one: the last layer's exchange must know."""
    table = SequenceTable(NUM_GROUPS, MAX_BLOCKS)
    table.start_sequence(SequenceStart(0, [5], 1, SamplingParams(), 0, ()))
    entry = SequenceStep(0, 0, 1, [[1], [2]], -1, True)
    plan = RankStep(StepPlan(1, [], [entry], []), (1, 10), (1, 1))
    layout = layout_of(table, reuses_memory=reuses_memory)
    rows = layout.make_step(plan, [table.advance_sequence(entry)], False).rows
    left = rows.narrow()
    assert (rows.replicas, left.replicas) == ((1, 10), (1, 1))
    assert left.slots is rows.slots
    assert left.take(rows.positions) is rows.positions


def test_decode_steps_of_a_kind_share_their_memory() -> None:
    table = SequenceTable(1, MAX_BLOCKS)
    layout = layout_of(table, num_groups=1)
    table.start_sequence(SequenceStart(7, [3, 4, 5], 3, SamplingParams(), 0, ()))

    def step_at(start: int, greedy: bool) -> StepInput:
        entry = SequenceStep(7, start, 1, [[9] if start == 0 else []], -1, True)
        return layout.make_step(
            RankStep(StepPlan(1, [], [entry], []), (1,), (1,)), [table.advance_sequence(entry)], greedy
        )

    first, second, other = step_at(0, True), step_at(1, True), step_at(2, False)
    assert first is second
    assert (first.is_replayable, first.greedy, other.is_replayable, other.greedy) == (True, True, True, False)
    assert first.token_ids.data_ptr() == other.token_ids.data_ptr()
    assert other.token_ids.tolist() == [5]


def test_what_would_not_fit_is_refused() -> None:
    table, slots = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    tables = torch.zeros(1, 3, dtype=torch.int32)
    for rows, starts, lengths, message in (
        ([2], [0], [1], "outside the table"),
        ([-1], [0], [1], "outside the table"),
        ([0], [12], [1], "more blocks"),
        ([0], [-1], [1], "a start and a token"),
        ([0], [0], [0], "a start and a token"),
        ([0, 1], [0], [1], "as many"),
        ([0], [0, 0], [1], "as many"),
    ):
        with pytest.raises(ValueError, match=message):
            _cpu.lay_out_blocks(table, rows, starts, lengths, BLOCK_SIZE, tables, slots)
    lens, query_starts = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="positions"):
        _cpu.lay_out_tokens([0], [2], slots, query_starts, lens)


@given(st.lists(st.lists(st.sampled_from([3, 511, 512, 1030]), min_size=1, max_size=3), min_size=2, max_size=6))
def test_decode_steps_with_shared_keys_do_not_depend_on_those_before(steps: list[list[int]]) -> None:
    share = KeyShare(1, 2, 16, (SharedGroup(None, 50), SharedGroup(100, 50)))
    sizes = StepSizes(3, 80, 2, 16, hidden_size=1, dtype=torch.float32, share=share)
    table = SequenceTable(2, 80, 2)
    tokens = list(range(1100))
    for seq_id in range(3):
        table.start_sequence(SequenceStart(seq_id, tokens, len(tokens), SamplingParams(), 0, ()))
    used = StepLayout(table, sizes, reuses_memory=True)
    for starts in steps:
        entries = [SequenceStep(number, start, 1, [[], []], -1, True) for number, start in enumerate(starts)]
        sequences = [table.advance_sequence(entry) for entry in entries]
        plan = RankStep(StepPlan(1, [], entries, []), (len(starts),), (len(starts),))
        fresh = StepLayout(table, sizes, reuses_memory=True)
        rows, expected = (layout.make_step(plan, sequences, True).rows for layout in (used, fresh))
        assert [slots.tolist() for slots in rows.slots] == [slots.tolist() for slots in expected.slots]
        assert rows.shared is not None
        assert expected.shared is not None
        for own, other in zip(rows.shared, expected.shared, strict=True):
            assert own.runs == other.runs
            of_own, of_other = ([part.tolist() for run in group.tables for part in run] for group in (own, other))
            assert of_own == of_other
