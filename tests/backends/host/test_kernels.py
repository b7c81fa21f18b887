from __future__ import annotations

import threading

import pytest
import torch

from shardline.runtime.ops.dispatch import available_isas, isa, num_threads, set_isa, set_num_threads
from shardline.runtime.ops.linear import linear, pack_weight

from .helpers import assert_same_bits


def test_isas():
    names = available_isas()
    assert names[0] == "portable"
    assert isa() == names[-1]
    set_isa("portable")
    assert isa() == "portable"
    set_isa(names[-1])
    with pytest.raises(ValueError, match="no kernels for 'sse9'"):
        set_isa("sse9")


def test_a_packed_weight_serves_every_isa():
    weight, x = torch.randn(70, 65), torch.randn(3, 65)
    packed = pack_weight(weight)
    for name in available_isas():
        set_isa(name)
        torch.testing.assert_close(linear(x, packed), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_each_calling_thread_has_its_own_pool():
    weight, x = pack_weight(torch.randn(640, 300)), torch.randn(100, 300)
    expected = linear(x, weight)
    results: dict[int, tuple[int, torch.Tensor]] = {}

    def rank(index: int) -> None:
        set_num_threads(index + 1)
        for _ in range(50):
            out = linear(x, weight)
        results[index] = num_threads(), out

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_threads() == 1
    for index in range(4):
        assert results[index][0] == index + 1
        assert_same_bits(results[index][1], expected)


def test_many_more_threads_than_cores():
    weight, x = pack_weight(torch.randn(640, 100)), torch.randn(40, 100)
    expected = linear(x, weight)
    set_num_threads(16)
    for _ in range(200):
        assert_same_bits(linear(x, weight), expected)
    set_num_threads(1)


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        set_num_threads(0)
    with pytest.raises(ValueError, match="one CPU per thread"):
        set_num_threads(2, pin=[0])
    with pytest.raises(ValueError, match="cannot pin"):
        set_num_threads(1, pin=[1023])
