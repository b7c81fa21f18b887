"""Memory that is taken before it is asked for is memory like any other."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest
import torch

from shardline import _cpu
from shardline.kernels.host.memory import Reserve, streamed_empty, weight_reserve
from shardline.kernels.memory import map_memory

HUGE_PAGE = 2 << 20
SIZE = 32 * HUGE_PAGE


def resident(address: int, num_bytes: int = SIZE) -> int:
    """Bytes that are there of the pages from an address on, none if they are not mapped any more."""
    is_there = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), is_there) != 0:
        return 0
    return mmap.PAGESIZE * sum(page & 1 for page in is_there)


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@pytest.fixture
def reserve() -> Iterator[Reserve]:
    yield weight_reserve
    weight_reserve.release_rest()


def test_touching_takes_pages_and_changes_nothing() -> None:
    memory = map_memory(SIZE)
    memory[5], memory[SIZE - 1] = 6, 7
    _cpu.PageToucher(memoryview(memory)[: SIZE // 2]).wait()
    assert SIZE // 2 <= resident(address_of(memory)) < SIZE
    _cpu.PageToucher(memory).wait()
    assert resident(address_of(memory)) == SIZE
    assert (memory[5], memory[SIZE - 1]) == (6, 7)
    assert memory[:].count(0) == SIZE - 2


def test_touching_ends_when_it_is_stopped_or_dropped() -> None:
    memory = map_memory(64 * SIZE)
    toucher = _cpu.PageToucher(memory)
    toucher.stop()
    assert resident(address_of(memory), 64 * SIZE) < 64 * SIZE
    _cpu.PageToucher(memory)
    assert resident(address_of(memory), 64 * SIZE) < 64 * SIZE
    toucher.wait()
    with pytest.raises(BufferError):
        memory.close()  # the toucher holds it
    del toucher
    memory.close()


def test_tensors_are_taken_from_the_reserve_in_order(reserve: Reserve) -> None:
    reserve.fill_memory(SIZE, SIZE // 2)
    first, second = streamed_empty((100, 30), torch.bfloat16), streamed_empty((HUGE_PAGE,), torch.float32)
    assert second.data_ptr() - first.data_ptr() == 6016, "aligned to 64 bytes"
    too_large = streamed_empty((SIZE,), torch.uint8)
    third = streamed_empty((7,), torch.uint8)
    assert third.data_ptr() == second.data_ptr() + second.nbytes
    for value, tensor in enumerate((first, second, too_large, third)):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(value)
    assert all(bool((tensor == value).all()) for value, tensor in enumerate((first, second, too_large, third)))
    assert streamed_empty((0, 4), torch.float32).shape == (0, 4)


def test_what_nobody_takes_is_given_back(reserve: Reserve) -> None:
    reserve.fill_memory(SIZE, SIZE)
    tensor = streamed_empty((SIZE // 2,), torch.uint8).fill_(3)
    address = tensor.data_ptr()
    reserve.release_rest()
    assert resident(address) == SIZE // 2
    assert bool((tensor == 3).all()), "tensors outlive the reserve that they are from"
    assert not address <= streamed_empty((5,), torch.uint8).data_ptr() < address + SIZE
    del tensor
    assert resident(address) == 0


def test_an_empty_reserve_has_nothing() -> None:
    reserve = Reserve()
    assert reserve.take_memory(1) is None
    reserve.fill_memory(0, 0)
    assert reserve.take_memory(HUGE_PAGE + 1) is None
    reserve.release_rest()
    assert reserve.take_memory(1) is None
