"""Mamba-2 against its reference, in parts and beside other sequences."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from shardline.runtime.ops.attention.mamba import MambaInputs, MambaWeights, mamba, mamba_reference
from shardline.runtime.ops.attention.sequence_states import SequenceRows, SequenceStates
from tests.runtime.ops.helpers import KERNELS

pytestmark = pytest.mark.usefixtures("isa")

EPS = 1e-3
ROWS = 7


class Shape(NamedTuple):
    groups: int
    heads: int
    key_dim: int
    head_dim: int
    taps: int = 4
    has_bias: bool = True

    @property
    def channels(self) -> int:
        return 2 * self.groups * self.key_dim + self.heads * self.head_dim


SHAPES = [Shape(2, 6, 24, 20), Shape(1, 2, 128, 64, has_bias=False), Shape(3, 3, 7, 80, 2), Shape(2, 40, 8, 8, 1)]


def make_weights(shape: Shape, dtype: torch.dtype) -> MambaWeights:
    return MambaWeights(
        torch.randn(shape.channels, shape.taps),
        torch.randn(shape.channels) if shape.has_bias else None,
        torch.rand(shape.heads) * 3 - 2,
        torch.randn(shape.heads),
        torch.randn(shape.heads),
        torch.randn(shape.heads * shape.head_dim).to(dtype),
    )


def make_inputs(shape: Shape, num_tokens: int, dtype: torch.dtype) -> MambaInputs:
    """Columns of one projection, so rows are strided."""
    widths = [shape.channels, shape.heads * shape.head_dim, shape.heads]
    columns = torch.randn(num_tokens, sum(widths) + 3).to(dtype)
    return MambaInputs(*torch.split(columns[:, 3:], widths, dim=1))


def make_states(shape: Shape, dtype: torch.dtype) -> SequenceStates:
    """Memory holds anything at first."""
    state = torch.full((ROWS, shape.heads, shape.key_dim, shape.head_dim), torch.nan)
    return SequenceStates(state, torch.full((ROWS, shape.taps - 1, shape.channels), torch.nan, dtype=dtype))


def run(x: MambaInputs, starts: list[int], context: list[int], weights: MambaWeights, states: SequenceStates) -> Tensor:
    """The outputs of sequences in the first rows."""
    rows = SequenceRows(*(torch.tensor(part, dtype=torch.int32) for part in (starts, context, range(len(context)))))
    return mamba(KERNELS, x, weights, states, rows, EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(shape: Shape, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    weights, states, x = make_weights(shape, dtype), make_states(shape, dtype), make_inputs(shape, 37, dtype)
    found = run(x, [0, 37], [37], weights, states)
    expected = mamba_reference(x, weights, shape.key_dim, shape.groups, EPS)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert torch.isnan(states.state[1:]).all(), "another sequence's state was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sequence_notices_neither_steps_nor_neighbours(shape: Shape, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    weights, one, other = make_weights(shape, dtype), *(make_inputs(shape, 20, dtype) for _ in range(2))
    whole = [run(x, [0, 20], [20], weights, make_states(shape, dtype)) for x in (one, other)]
    states, parts = make_states(shape, dtype), []
    bounds = [0, 2, 3, 9, *range(10, 21)]
    for begin, end in itertools.pairwise(bounds):
        x = MambaInputs(*(torch.cat([a[begin:end], b[begin:end]]) for a, b in zip(one, other, strict=True)))
        parts.append(run(x, [0, end - begin, 2 * (end - begin)], [end, end], weights, states).chunk(2))
    for own, expected in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(own), expected)


def test_groups_do_not_notice_each_other() -> None:
    """A rank has some of the groups, with their heads."""
    torch.manual_seed(7)
    shape, dtype = Shape(3, 6, 24, 20), torch.float32
    weights, x = make_weights(shape, dtype), make_inputs(shape, 9, dtype)
    whole = run(x, [0, 9], [9], weights, make_states(shape, dtype))
    heads, values = slice(2, 6), slice(2 * 20, 6 * 20)
    channels = [*range(24, 72), *range(72 + 24, 72 + 72), *range(144 + values.start, 144 + values.stop)]
    part = MambaInputs(x.qkv[:, channels], x.gate[:, values], x.step[:, heads])
    assert weights.conv_bias is not None
    log, offset, skip = (tensor[heads] for tensor in (weights.decay_log, weights.step_offset, weights.skip))
    of_part = MambaWeights(weights.conv[channels], weights.conv_bias[channels], log, offset, skip, weights.norm[values])
    found = run(part, [0, 9], [9], of_part, make_states(Shape(2, 4, 24, 20), dtype))
    assert torch.equal(found, whole[:, values])
