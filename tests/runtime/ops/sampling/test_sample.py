from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardline import _cpu
from shardline.runtime.ops.sampling.sample import (
    greedy_argmax,
    kept_tokens_reference,
    sample,
    sample_reference,
)
from tests.runtime.ops.helpers import KERNELS, assert_same_bits, randn


def sample_rows(logits: Tensor, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=0, choices=0, positions=0):
    """`sample` with one setting for all rows, or one per row."""

    def per_row(value, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value).to(dtype).expand(logits.shape[0]).contiguous()

    return sample(
        KERNELS,
        logits,
        temperature=per_row(temperature, torch.float32),
        top_k=per_row(top_k, torch.int32),
        top_p=per_row(top_p, torch.float32),
        min_p=per_row(min_p, torch.float32),
        seeds=per_row(seeds, torch.int64),
        choices=per_row(choices, torch.int64),
        positions=per_row(positions, torch.int64),
    )


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """The vectors published with Random123."""
    first, second, third, fourth, *keys = (int(word, 16) for text in (counter, key) for word in text.split())
    drawn = _cpu.philox4x32((first, second, third, fourth), (keys[0], keys[1]))
    assert drawn == tuple(int(word, 16) for word in expected.split())


def test_uniform_depends_on_every_part_of_the_key():
    draws = {
        _cpu.uniform(seed, choice, position, purpose)
        for seed in (0, 1, 1 << 63)
        for choice in (0, 1)
        for position in (0, 1, 1 << 40)
        for purpose in (0, 1)
    }
    assert len(draws) == 36
    assert all(0.0 <= draw < 1.0 for draw in draws)


@pytest.mark.usefixtures("isa", "two_threads")
def test_greedy_takes_the_lowest_id_on_ties(rng):
    for vocab_size in (1, 3, 64, 1000):
        logits = torch.randint(0, 5, (20, vocab_size), generator=rng).float()
        ids, values = greedy_argmax(KERNELS, logits)
        expected = torch.from_numpy(logits.numpy().argmax(axis=1))
        assert torch.equal(ids, expected)
        assert torch.equal(values, logits.amax(1))
        assert torch.equal(sample_rows(logits, temperature=0.0), expected)


def test_greedy_ignores_nan_and_survives_rows_of_nothing():
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[nan, 1.0, 2.0], [-inf, -inf, -inf], [nan, nan, nan], [1.0, inf, inf]])
    assert sample_rows(logits, temperature=0.0).tolist() == [2, 0, 0, 1]
    assert sample_rows(logits, temperature=1.0).tolist()[1:] == [0, 0, 1]


@settings(max_examples=300, deadline=None)
@given(
    # Halves of integers make ties common.
    logits=st.lists(st.integers(-8, 8), min_size=1, max_size=40),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(-1, 12),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 0.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)
def test_filters_against_brute_force(logits, temperature, top_k, top_p, min_p, seed):
    row = torch.tensor(logits, dtype=torch.float32) / 2
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = sample_reference(row.numpy(), _cpu.uniform(seed, 3, 7, 0), **filters)
    assert sample_rows(row[None], **filters, seeds=seed, choices=3, positions=7).item() == expected


@cache
def large_logits(spread: float) -> Tensor:
    """20 rows, flat or peaked."""
    return randn(20, 32000, rng=torch.Generator().manual_seed(0)) * spread


@cache
def references(spread: float, top_k: int, top_p: float, min_p: float) -> list[tuple[np.ndarray, int]]:
    """For each of these rows, the weights of the tokens that stay and the drawn one, which are those of every ISA."""
    filters: dict[str, Any] = {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return [
        (kept_tokens_reference(row, **filters), sample_reference(row, _cpu.uniform(0, 0, number, 0), **filters))
        for number, row in enumerate(large_logits(spread).numpy())
    ]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (500, 1.0, 0.0), (0, 0.7, 0.0), (900, 0.9, 0.01)])
@pytest.mark.parametrize("spread", [0.5, 3.0])
@pytest.mark.usefixtures("isa")
def test_a_large_vocabulary(top_k, top_p, min_p, spread):
    """Flat and peaked rows, so that the nucleus is small, large, or nearly everything."""
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    tokens = sample_rows(large_logits(spread).clone(), **filters, positions=torch.arange(20))
    agree = 0
    for token, (weights, expected) in zip(tokens.tolist(), references(spread, **filters), strict=True):
        assert weights[token] > 0
        agree += token == expected
    assert agree >= 19  # a draw may fall between the fp32 and the fp64 weights


@pytest.mark.usefixtures("isa")
def test_the_distribution():
    weights = np.array([5.0, 1.0, 0.0, 3.0, 1.0])
    with np.errstate(divide="ignore"):
        logits = torch.tensor(np.log(weights), dtype=torch.float32)
    num_draws = 20000
    tokens = sample_rows(logits.expand(num_draws, -1).contiguous(), seeds=1234, positions=torch.arange(num_draws))
    observed = np.bincount(tokens.numpy(), minlength=5)
    assert observed[2] == 0
    expected = num_draws * weights / weights.sum()
    present = weights > 0
    chi_square = (((observed - expected) ** 2)[present] / expected[present]).sum()
    assert chi_square < 16.3  # 3 degrees of freedom, one in a thousand; the seed is fixed


@pytest.mark.usefixtures("isa", "two_threads")
def test_a_row_does_not_depend_on_the_batch(rng):
    logits = randn(50, 1003, rng=rng)
    settings_per_row = {
        "temperature": torch.rand(50, generator=rng) * 2,
        "top_k": torch.randint(-1, 100, (50,), generator=rng),
        "top_p": torch.rand(50, generator=rng),
        "min_p": torch.rand(50, generator=rng) * 0.1,
        "seeds": torch.randint(0, 2**62, (50,), generator=rng),
    }
    whole = sample_rows(logits, **settings_per_row)
    order = torch.randperm(50, generator=rng)
    permuted = sample_rows(logits[order], **{name: value[order] for name, value in settings_per_row.items()})
    assert_same_bits(permuted.int(), whole[order].int())


def test_rows_may_be_strided(rng):
    wide = randn(5, 60, rng=rng)
    assert torch.equal(sample_rows(wide[:, 7:40]), sample_rows(wide[:, 7:40].contiguous()))


def test_wrong_arrays_are_named(rng):
    with pytest.raises(TypeError, match="logits must be float32"):
        sample_rows(randn(2, 5, dtype=torch.bfloat16, rng=rng))
    with pytest.raises(ValueError, match="temperature has shape"):
        sample(
            KERNELS,
            randn(2, 5, rng=rng),
            temperature=torch.ones(3),
            top_k=torch.zeros(2, dtype=torch.int32),
            top_p=torch.ones(2),
            min_p=torch.zeros(2),
            seeds=torch.zeros(2, dtype=torch.int64),
            choices=torch.zeros(2, dtype=torch.int64),
            positions=torch.zeros(2, dtype=torch.int64),
        )
