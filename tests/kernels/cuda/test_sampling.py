from __future__ import annotations

from typing import Any

import pytest
import torch

from shardline.kernels.cuda.triton import sampling as sampling_kernels
from shardline.runtime.ops.sampling import sample as sampling
from tests.kernels.cuda.helpers import KERNELS
from tests.runtime.ops.helpers import KERNELS as HOST_KERNELS
from tests.runtime.ops.helpers import assert_same_bits, randn


def test_greedy_takes_the_lowest_id_on_ties(rng):
    logits = randn(5, 5000, rng=rng).mul(3).round().div(3)  # plenty of ties
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    logits[3, [4500, 100]] = torch.inf
    ids, values = torch.full((5,), -1), torch.full((5,), torch.nan)
    KERNELS.greedy_argmax(logits[:, :4900], ids, values)
    expected_ids, expected_values = sampling.greedy_argmax(HOST_KERNELS, logits[:, :4900])
    assert torch.equal(ids, expected_ids)
    assert_same_bits(values, expected_values)


def parameters(*rows: tuple[float, int, float, float], rng: torch.Generator) -> dict[str, Any]:
    """(temperature, top_k, top_p, min_p) of every row, with seeds, choices and positions of all sizes."""
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    return {
        "temperature": temperature,
        "top_k": top_k.int(),
        "top_p": top_p,
        "min_p": min_p,
        "seeds": torch.randint(-(2**63), 2**63 - 1, (len(rows),), generator=rng),
        "choices": torch.arange(len(rows)),
        "positions": torch.arange(len(rows)) * 10_000_000_000,
    }


FILTERS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 50, 0.5, 0.01),
    (1.0, 0, 0.01, 0.0),
    (2.0, 5000, 0.95, 0.1),
]


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize(("vocab_size", "most_kept"), [(300, 8192), (300, 30), (2300, 300)])
def test_chooses_the_tokens_of_the_cpu(rng, has_ties, vocab_size, most_kept, monkeypatch):
    monkeypatch.setattr(sampling_kernels, "_MOST_KEPT", most_kept)
    rows = FILTERS if vocab_size == 300 else FILTERS[:6]
    logits = randn(len(rows), vocab_size, rng=rng) * 2
    if has_ties:
        logits = logits.round()
    logits[1, 7], logits[2, 3] = torch.nan, -torch.inf
    arguments = parameters(*rows, rng=rng)
    tokens = torch.full((len(rows),), -1)
    KERNELS.sample(logits, *(*arguments.values(), 0, tokens))
    assert torch.equal(tokens, sampling.sample(HOST_KERNELS, logits, **arguments))


def test_rows_without_a_finite_maximum(rng):
    logits = randn(3, 100, rng=rng)
    logits[0, 60], logits[1], logits[2] = torch.inf, -torch.inf, torch.nan
    arguments = parameters(*[(1.0, 5, 0.9, 0.0)] * 3, rng=rng)
    tokens = torch.full((3,), -1)
    KERNELS.sample(logits, *(*arguments.values(), 0, tokens))
    assert torch.equal(tokens, sampling.sample(HOST_KERNELS, logits, **arguments))
