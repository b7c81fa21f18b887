from __future__ import annotations

import threading

import pytest
import torch

from shardline import _cpu
from shardline.weights.formats.plain import Format
from tests.runtime.ops.helpers import KERNELS, assert_same_bits


def test_isas():
    names = _cpu.available_isas()
    assert names[0] == "portable"
    assert _cpu.isa() == names[-1]
    _cpu.set_isa("portable")
    assert _cpu.isa() == "portable"
    _cpu.set_isa(names[-1])
    with pytest.raises(ValueError, match="no kernels for 'sse9'"):
        _cpu.set_isa("sse9")


def test_a_packed_weight_serves_every_isa():
    weight, x = torch.randn(70, 65), torch.randn(3, 65)
    packed = Format().pack_linear(KERNELS, weight)
    for name in _cpu.available_isas():
        _cpu.set_isa(name)
        torch.testing.assert_close(packed(x), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_each_calling_thread_has_its_own_pool():
    weight, x = Format().pack_linear(KERNELS, torch.randn(640, 300)), torch.randn(100, 300)
    expected = weight(x)
    results: dict[int, tuple[int, torch.Tensor]] = {}

    def rank(index: int) -> None:
        _cpu.set_num_threads(index + 1)
        for _ in range(50):
            out = weight(x)
        results[index] = _cpu.num_threads(), out

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _cpu.num_threads() == 1
    for index in range(4):
        assert results[index][0] == index + 1
        assert_same_bits(results[index][1], expected)


def test_many_more_threads_than_cores():
    weight, x = Format().pack_linear(KERNELS, torch.randn(640, 100)), torch.randn(40, 100)
    expected = weight(x)
    _cpu.set_num_threads(16)
    for _ in range(200):
        assert_same_bits(weight(x), expected)
    _cpu.set_num_threads(1)


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        _cpu.set_num_threads(0)
    with pytest.raises(ValueError, match="one CPU per thread"):
        _cpu.set_num_threads(2, pin=[0])
    with pytest.raises(ValueError, match="cannot pin"):
        _cpu.set_num_threads(1, pin=[1023])
