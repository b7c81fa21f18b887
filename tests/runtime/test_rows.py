"""The table of a step's rows, and what layers take from it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shardline.runtime.layers.linear import ColumnLinear
from shardline.runtime.layers.token_input import with_inputs
from shardline.runtime.lockstep import empty_rows
from shardline.runtime.step import Rows
from shardline.weights.formats.plain import Format
from tests.runtime.ops.helpers import KERNELS


def table(count: int) -> Rows:
    positions = torch.arange(count)
    starts, lens = torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
    return Rows(positions, starts, lens, (), (positions,), (count,))


def test_narrowed_rows_take_their_own() -> None:
    places = torch.tensor([1, 4])
    left = dataclasses.replace(table(2), slots=(), places=places)
    rows = dataclasses.replace(table(5), narrowed=left)
    x = torch.randn(5, 3)
    assert rows.narrow() is left
    assert left.narrow() is left
    assert torch.equal(left.take(x), x[[1, 4]])
    assert rows.take(x) is x
    assert rows.padding is rows.slots[0]
    assert left.padding is None, "padded steps have no rows to drop"


def test_inputs_of_tokens_are_narrowed_too() -> None:
    rows = dataclasses.replace(table(3), narrowed=dataclasses.replace(table(1), places=torch.tensor([2])))
    inputs = torch.randn(3, 2, 2, 4)
    given = with_inputs(rows, inputs)
    assert given.token_inputs is inputs
    narrowed = given.narrow().token_inputs
    assert narrowed is not None
    assert torch.equal(narrowed, inputs[2:])


def test_a_replica_without_tokens_knows_those_of_others() -> None:
    rows = empty_rows((0, 7), (0, 2))
    assert (len(rows), rows.replicas, rows.narrow().replicas) == (0, (0, 7), (0, 2))


def test_a_linear_refuses_the_rows_of_another_table() -> None:
    linear = object.__new__(ColumnLinear)
    linear.packed, linear.bias = Format().pack_linear(KERNELS, torch.randn(4, 8)), None
    linear._adapters = None
    linear(torch.randn(3, 8), table(3))
    with pytest.raises(AssertionError, match="other rows"):
        linear(torch.randn(3, 8), table(2))
