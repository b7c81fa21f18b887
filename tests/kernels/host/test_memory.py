"""Memory on huge pages, and memory for activations, is memory like any other."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardline import _cpu
from shardline.kernels.host.memory import streamed_empty


@pytest.mark.parametrize("shape", [(3, 5), (1 << 20, 3), (7, 1 << 18, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_it_holds_what_is_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = streamed_empty(shape, dtype)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    tensor.fill_(3)
    other = streamed_empty(shape, dtype).fill_(4)
    assert bool((tensor == 3).all())
    assert bool((other == 4).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64, torch.uint8])
def test_activations_of_every_dtype(dtype: torch.dtype) -> None:
    tensor = _cpu.activation_empty(dtype, 3, 0, 5)
    assert (tensor.shape, tensor.dtype) == ((3, 0, 5), dtype)
    tensor = _cpu.activation_empty(dtype, 3, 2, 5)
    assert tensor.shape == (3, 2, 5)
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3_000_000)), max_size=60))
def test_activations_keep_what_they_hold(actions: list[tuple[int, int]]) -> None:
    """Against a plain list: each action drops one tensor of those held, if there are so many, or takes another."""
    before = _cpu.activation_bytes()
    held: list[torch.Tensor] = []
    for number, (index, size) in enumerate(actions):
        if index < len(held):
            held.pop(index)
        else:
            held.append(_cpu.activation_empty(torch.uint8, size).fill_(number % 251))
        assert all(t.numel() == 0 or bool(t[0] == t[-1]) for t in held)
        spans = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t in held)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    held.clear()
    assert _cpu.activation_bytes() == before


def test_a_view_keeps_its_memory() -> None:
    before = _cpu.activation_bytes()
    view = _cpu.activation_empty(torch.float32, 4, 64)[2:]
    assert _cpu.activation_bytes() == before + 4 * 64 * 4
    del view
    assert _cpu.activation_bytes() == before


@pytest.mark.parametrize("sizes", [(-1,), (2, -3)])
def test_no_negative_sizes(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="negative"):
        _cpu.activation_empty(torch.float32, *sizes)


def test_no_activations_of_odd_dtypes() -> None:
    with pytest.raises(TypeError, match=r"complex64"):
        _cpu.activation_empty(torch.complex64, 2)
