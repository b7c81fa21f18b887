"""Marks of rows, from the tokens of their sequences, against the logits processors of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

from shardline.config.engine import LogprobsMode
from shardline.models.partition import Span
from shardline.runtime.features.watermark import GreenMark, TournamentMark
from shardline.runtime.parallel.groups import make_single_rank_groups
from shardline.runtime.sampling.inputs import Draws, SamplingInput
from shardline.runtime.sampling.reports import Wanted
from shardline.runtime.sampling.sampler import Sampler, SamplingPlan
from shardline.sampling_params import SamplingParams
from shardline.watermark.keys import KGWKey, SynthIDKey, parse_key
from tests.runtime.ops.helpers import KERNELS, randn

VOCAB_SIZE = 300
TEXT = np.array([5, 7, 5, 9, 2, 7, 5, 9, 8, 5, 7, 5, 9], dtype=np.int64)


@pytest.mark.parametrize(("scheme", "width"), [("lefthash", 1), ("lefthash", 4), ("selfhash", 1), ("selfhash", 3)])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_green_tokens_get_the_bonus_of_transformers(
    rng: torch.Generator, scheme: str, width: int, temperature: float
) -> None:
    config = WatermarkingConfig(hashing_key=2**63 - 25, seeding_scheme=scheme, context_width=width, bias=1.5)
    theirs = config.construct_processor(VOCAB_SIZE, "cpu")
    key = parse_key(config.to_dict())
    assert isinstance(key, KGWKey)
    mark, sampling = GreenMark(key, VOCAB_SIZE), SamplingParams(temperature=temperature)
    for length in (3, 2, len(TEXT)):
        logits = randn(VOCAB_SIZE, rng=rng)
        expected = theirs(torch.from_numpy(TEXT[None, :length]), (logits / (temperature or 1.0))[None])[0]
        mark.edit(logits.numpy(), TEXT[:length], 1, sampling)
        torch.testing.assert_close(logits / (temperature or 1.0), expected)


def test_lists_are_kept_within_their_memory(rng: torch.Generator) -> None:
    mark, row = GreenMark(KGWKey(hashing_key=3), VOCAB_SIZE), randn(VOCAB_SIZE, rng=rng).numpy()
    mark._most_known = 2
    marked = []
    for token_id in (5, 6, 5, 7, 6, 5):
        marked.append(row.copy())
        mark.edit(marked[-1], np.array([token_id]), 0, SamplingParams(temperature=1.0))
    assert len(mark._known) == 2
    assert (marked[0] == marked[2]).all()
    assert (marked[0] == marked[5]).all()
    assert (marked[1] == marked[4]).all()
    assert not (marked[0] == marked[1]).all()


@pytest.mark.parametrize("history", [1024, 3])
def test_a_tournament_is_held_as_in_transformers(rng: torch.Generator, history: int) -> None:
    """Fed an answer token by token, both skip the contexts that have occurred; ours reads them from the text."""
    config = SynthIDTextWatermarkingConfig(ngram_len=3, keys=list(range(7, 700, 23)), context_history_size=history)
    theirs = config.construct_processor(VOCAB_SIZE, "cpu")
    key = parse_key(config.to_dict())
    assert isinstance(key, SynthIDKey)
    mark, num_skipped = TournamentMark(key), 0
    for length in range(len(TEXT)):  # their answer begins after no token
        logits = randn(VOCAB_SIZE, rng=rng)
        row = logits.numpy().copy()
        expected = theirs(torch.from_numpy(TEXT[None, :length]), (logits / 0.8)[None].double())[0]
        mark.edit(row, TEXT[:length], 0, SamplingParams(temperature=0.8))
        if length < 2:  # they begin with a context of zeros
            assert (row == logits.numpy()).all()
            continue
        num_skipped += bool((row == logits.numpy()).all())
        probs = (torch.from_numpy(row).double() / 0.8).softmax(0)
        torch.testing.assert_close(probs, expected.softmax(0), rtol=3e-5, atol=1e-12)
    assert num_skipped == {1024: 4, 3: 0}[history]


def test_what_the_filters_drop_has_no_part_in_a_tournament(rng: torch.Generator) -> None:
    row = randn(VOCAB_SIZE, rng=rng).numpy()
    kept = set(np.argsort(-row)[:9].tolist())
    TournamentMark(SynthIDKey(keys=(1, 2, 3))).edit(row, TEXT, 2, SamplingParams(temperature=1.0, top_k=9))
    assert set(np.flatnonzero(np.isfinite(row)).tolist()) <= kept


def test_the_first_tokens_may_have_no_mark(rng: torch.Generator) -> None:
    for skips in (False, True):
        mark = TournamentMark(SynthIDKey(keys=tuple(range(9)), ngram_len=4, skip_first_ngram_calls=skips))
        changed = []
        for length in range(2, 9):
            logits = randn(VOCAB_SIZE, rng=rng)
            row = logits.numpy().copy()
            mark.edit(row, np.arange(length), 3, SamplingParams(temperature=1.0))
            changed.append(bool((row != logits.numpy()).any()))
        assert changed == [False, *[not skips] * 3, True, True, True]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_raw_log_probabilities_are_those_before_the_mark(rng: torch.Generator, mode: LogprobsMode) -> None:
    logits = randn(2, 50, rng=rng)
    sampler = Sampler(
        KERNELS, [Span(0, 50)], make_single_rank_groups()["tensor"], torch.device("cpu"), logprobs_mode=mode
    )
    one, zero = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    draws = Draws(one, zero.int(), one, torch.zeros(2), zero, zero, zero)
    plan = SamplingPlan([1, 2], [Wanted(1), Wanted(1)], SamplingInput(zero, draws, None))
    marked = logits.clone()
    marked[0, 7] += 40.0

    def mark(rows: torch.Tensor) -> None:
        rows.copy_(marked)

    sampled = sampler.sample_tokens(logits.clone(), plan, plan.inputs, editors=[mark])
    assert sampled.tokens[0] == 7
    assert sampled.reports is not None
    reported = (logits if mode == "raw_logprobs" else marked).log_softmax(1).gather(1, sampled.tokens[:, None])[:, 0]
    torch.testing.assert_close(sampled.reports.rows.chosen_logprobs, reported)
