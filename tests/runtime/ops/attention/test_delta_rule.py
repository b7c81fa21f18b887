"""The gated delta rule against its reference, in parts and beside other sequences."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from shardline.runtime.ops.attention.delta_rule import (
    DeltaInputs,
    DeltaWeights,
    delta_rule,
    delta_rule_reference,
)
from shardline.runtime.ops.attention.sequence_states import SequenceRows, SequenceStates
from tests.runtime.ops.helpers import KERNELS

pytestmark = pytest.mark.usefixtures("isa")

EPS = 1e-3
ROWS = 7


class Shape(NamedTuple):
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


SHAPES = [Shape(2, 6, 24, 20), Shape(1, 1, 128, 128), Shape(3, 3, 7, 80, 2), Shape(2, 40, 8, 8, 1)]


def make_weights(shape: Shape, dtype: torch.dtype) -> DeltaWeights:
    return DeltaWeights(
        torch.randn(shape.channels, shape.taps),
        torch.rand(shape.value_heads) * 3 - 2,
        torch.randn(shape.value_heads),
        torch.randn(shape.value_dim).to(dtype),
    )


def make_inputs(shape: Shape, num_tokens: int, dtype: torch.dtype) -> DeltaInputs:
    """Columns of one projection, so rows are strided."""
    widths = [shape.channels, shape.value_heads * shape.value_dim, shape.value_heads, shape.value_heads]
    columns = torch.randn(num_tokens, sum(widths) + 3).to(dtype)
    return DeltaInputs(*torch.split(columns[:, 3:], widths, dim=1))


def make_states(shape: Shape, dtype: torch.dtype) -> SequenceStates:
    """Memory holds anything at first."""
    state = torch.full((ROWS, shape.value_heads, shape.key_dim, shape.value_dim), torch.nan)
    return SequenceStates(state, torch.full((ROWS, shape.taps - 1, shape.channels), torch.nan, dtype=dtype))


def run(
    inputs: list[DeltaInputs],
    before: list[int],
    places: list[int],
    weights: DeltaWeights,
    states: SequenceStates,
) -> list[Tensor]:
    """The outputs of sequences that have so many tokens before these, in one step."""
    lens = [len(x.qkv) for x in inputs]
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    context = torch.tensor([count + own for count, own in zip(before, lens, strict=True)], dtype=torch.int32)
    rows = SequenceRows(starts, context, torch.tensor(places, dtype=torch.int32))
    x = DeltaInputs(*(torch.cat(parts) for parts in zip(*inputs, strict=True)))
    return list(torch.split(delta_rule(KERNELS, x, weights, states, rows, EPS), lens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape: Shape, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    weights, states, x = make_weights(shape, dtype), make_states(shape, dtype), make_inputs(shape, 37, dtype)
    rows = SequenceRows(*(torch.tensor(part, dtype=torch.int32) for part in ([0, 37], [37], [4])))
    found = delta_rule(KERNELS, x, weights, states, rows, EPS)
    expected = delta_rule_reference(x, weights, (shape.key_dim, shape.value_dim), EPS)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    others = [place for place in range(ROWS) if place != 4]
    assert torch.isnan(states.state[others]).all(), "another sequence's state was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sequence_notices_neither_steps_nor_neighbours(shape: Shape, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    weights = make_weights(shape, dtype)
    sequences = [make_inputs(shape, count, dtype) for count in (11, 2, 30)]
    whole = [run([x], [0], [1], weights, make_states(shape, dtype))[0] for x in sequences]
    states, places = make_states(shape, dtype), [5, 0, 3]
    parts: list[list[Tensor]] = [[], [], []]
    # The first two steps are prompts, in part; then each sequence that has tokens left gets one a step.
    bounds = [[0, 5, 11], [0, 1, 2], [0, 1, 4, *range(5, 31)]]
    for step in range(max(map(len, bounds)) - 1):
        active = [index for index in (2, 0, 1) if step + 1 < len(bounds[index])]
        cuts = [slice(bounds[index][step], bounds[index][step + 1]) for index in active]
        some = [DeltaInputs(*(part[cut] for part in sequences[index])) for index, cut in zip(active, cuts, strict=True)]
        found = run(some, [cut.start for cut in cuts], [places[i] for i in active], weights, states)
        for index, out in zip(active, found, strict=True):
            parts[index].append(out)
    for own, expected in zip(parts, whole, strict=True):
        assert torch.equal(torch.cat(own), expected)


def test_heads_do_not_notice_each_other() -> None:
    """A rank has some of the key heads, with their value heads."""
    torch.manual_seed(7)
    shape, dtype = Shape(3, 6, 24, 20), torch.float32
    weights, x = make_weights(shape, dtype), make_inputs(shape, 9, dtype)
    [whole] = run([x], [0], [0], weights, make_states(shape, dtype))
    own, first_value = Shape(2, 4, 24, 20), 2
    keys, values = slice(24, 72), slice(2 * 20, 6 * 20)
    channels = [*range(24, 72), *range(72 + 24, 72 + 72), *range(144 + values.start, 144 + values.stop)]
    assert keys.stop - keys.start == own.key_heads * own.key_dim
    part = DeltaInputs(x.qkv[:, channels], x.gate[:, values], x.beta[:, first_value:], x.decay[:, first_value:])
    of_part = DeltaWeights(
        weights.conv[channels], weights.decay_log[first_value:], weights.decay_offset[first_value:], weights.norm
    )
    [found] = run([part], [0], [0], of_part, make_states(own, dtype))
    assert torch.equal(found, whole[:, values])
