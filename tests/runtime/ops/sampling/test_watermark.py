"""What watermarks do to rows of logits, against torch and transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import SynthIDTextWatermarkingConfig

from shardline.runtime.ops.sampling.sample import kept_tokens_reference
from shardline.runtime.ops.sampling.watermark import (
    Filters,
    add_bonus_,
    exponential,
    filter_,
    hold_tournament_,
    logarithm,
    strongest,
    tournament_reference,
)
from tests.runtime.ops.helpers import randn


def test_a_bonus_is_added_to_green_tokens_only(rng: torch.Generator) -> None:
    logits = randn(50, rng=rng)
    logits[3] = -torch.inf
    green = torch.rand(50, generator=rng) < 0.4
    expected = logits + torch.where(green, torch.tensor(1.7), torch.tensor(0.0))
    add_bonus_(logits.numpy(), green.numpy(), 1.7)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("count", [1, 7, 40, 60])
def test_the_strongest_tokens_come_in_order(rng: torch.Generator, count: int) -> None:
    logits = torch.randint(0, 9, (40,), generator=rng).float()
    logits[::7] = -torch.inf
    expected = (-logits).sort(stable=True).indices[: min(count, 34)]
    assert strongest(logits.numpy(), count).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.7, 0, 1.0, 0.0),
        (1.0, 40, 1.0, 0.0),
        (1.3, 0, 0.9, 0.0),
        (0.9, 0, 0.9999, 0.0),
        (1.0, 0, 1.0, 0.05),
        (0.8, 900, 0.8, 0.01),
    ],
)
@pytest.mark.parametrize("vocab_size", [900, 5000])
def test_filters_drop_what_a_draw_drops(
    rng: torch.Generator, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    row = randn(vocab_size, rng=rng).numpy()
    row[7] = -np.inf
    kept = kept_tokens_reference(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p) > 0
    expected = np.where(kept, row, np.float32(-np.inf))
    filter_(row, Filters(temperature, top_k, top_p, min_p))
    assert row.tolist() == expected.tolist()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_a_tournament_has_the_probabilities_of_torch_and_of_transformers(
    rng: torch.Generator, temperature: float
) -> None:
    logits, bits = 3 * randn(300, rng=rng), torch.randint(0, 2, (300, 30), generator=rng)
    expected = tournament_reference(logits, bits, temperature)
    config = SynthIDTextWatermarkingConfig(ngram_len=2, keys=list(range(30)))
    processor: Any = config.construct_processor(300, "cpu")
    theirs = processor.update_scores((logits / temperature)[None].double(), bits[None])
    torch.testing.assert_close(theirs[0].exp(), expected)
    row = logits.numpy().copy()
    hold_tournament_(row, np.arange(300), bits.numpy().astype(np.uint8), temperature)
    marked = (torch.from_numpy(row).double() / temperature).softmax(0)
    torch.testing.assert_close(marked, expected, rtol=3e-5, atol=1e-12)


def test_candidates_keep_their_probability_together(rng: torch.Generator) -> None:
    logits, bits = randn(300, rng=rng), torch.randint(0, 2, (20, 8), generator=rng)
    row, candidates = logits.numpy().copy(), np.arange(0, 300, 15)
    hold_tournament_(row, candidates, bits.numpy().astype(np.uint8), 1.0)
    before, after = logits.double().softmax(0), torch.from_numpy(row).double().softmax(0)
    torch.testing.assert_close(after[candidates].sum(), before[candidates].sum(), rtol=1e-6, atol=0)
    assert not torch.equal(after[candidates], before[candidates])
    others = np.setdiff1d(np.arange(300), candidates)
    assert row[others].tolist() == logits[others].tolist()


def test_exp_and_log_of_basic_arithmetic() -> None:
    x = -np.concatenate([np.geomspace(1e-300, 699, 2000), np.arange(0.0, 50.0, 0.01), [0.0]])
    np.testing.assert_allclose(exponential(x), np.exp(x), rtol=1e-14)
    assert exponential(np.array([-701.0, -np.inf])).tolist() == [0.0, 0.0]
    y = np.concatenate([np.geomspace(1e-300, 1e300, 5000), [1.0, 0.5, np.nextafter(1, 0), np.nextafter(1, 2)]])
    np.testing.assert_allclose(logarithm(y), np.log(y), rtol=1e-14, atol=1e-300)
    assert logarithm(np.array([0.0])).tolist() == [-np.inf]
