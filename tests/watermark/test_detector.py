"""The detector against transformers' on the same tokens, and its p-values on texts without a mark."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from shardline.watermark.detector import binomial_tail, detect
from shardline.watermark.green_lists import GreenLists
from shardline.watermark.keys import KGWKey, SynthIDKey, new_key, parse_key
from shardline.watermark.tournament import Tournament

HASHING_KEY = 2**63 - 25
"""One, because `selfhash` makes a large table for each."""


def random_text(dice: random.Random, length: int, vocab_size: int) -> list[int]:
    """Few different tokens, so that n-grams occur again."""
    return [dice.randrange(2, min(40, vocab_size)) for _ in range(length)]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("lefthash", 1), ("lefthash", 3), ("selfhash", 1), ("selfhash", 3)])
def test_green_tokens_are_those_of_transformers(scheme: str, width: int) -> None:
    from transformers import LlamaConfig, WatermarkDetector, WatermarkingConfig

    dice = random.Random(width)
    for vocab_size in (97, 5003):
        theirs = WatermarkingConfig(
            greenlist_ratio=0.4, hashing_key=HASHING_KEY, seeding_scheme=scheme, context_width=width
        )
        config = LlamaConfig(vocab_size=vocab_size, bos_token_id=1)
        detector = WatermarkDetector(config, "cpu", theirs, ignore_repeated_ngrams=True)
        ids = random_text(dice, 60, vocab_size)
        expected: Any = detector(torch.LongTensor([ids]), return_dict=True)
        found = detect(ids, parse_key(theirs.to_dict()), vocab_size)
        assert found.num_counted == expected.num_tokens_scored[0] < 60
        assert found.score == expected.green_fraction[0]
        assert found.z_score == expected.z_score[0]


def test_tokens_that_a_shuffle_moves_twice_are_found() -> None:
    """Every token of a small vocabulary, so that all ways through the shuffle occur."""
    lists = GreenLists(KGWKey(hashing_key=77, greenlist_ratio=0.6), 40)
    for last in range(40):
        shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(77 * last))
        green = [token_id for token_id in range(40) if lists.is_green([last], token_id)]
        assert green == sorted(shuffled[:24].tolist())


@pytest.mark.parametrize(("ngram_len", "history"), [(2, 7), (5, 1024)])
def test_bits_and_repetitions_are_those_of_transformers(ngram_len: int, history: int) -> None:
    from transformers import SynthIDTextWatermarkingConfig

    dice = random.Random(ngram_len)
    keys = [dice.randrange(-(2**63), 2**63) for _ in range(12)]
    config = SynthIDTextWatermarkingConfig(
        ngram_len=ngram_len, keys=keys, context_history_size=history, sampling_table_size=5000, sampling_table_seed=3
    )
    theirs: Any = config.construct_processor(97, "cpu")
    key = parse_key(config.to_dict())
    assert isinstance(key, SynthIDKey)
    tournament = Tournament(key)
    ids = np.array(random_text(dice, 80, 97))
    contexts = tournament.hash_contexts(ids[:-1])
    text = torch.from_numpy(ids)[None]
    bits = tournament.bits(contexts, ids[ngram_len - 1 :])
    assert bits.tolist() == theirs.compute_g_values(text)[0].tolist()
    fresh = ~tournament.find_repeated(contexts)
    assert fresh.tolist() == theirs.compute_context_repetition_mask(text)[0].bool().tolist()
    for length in range(ngram_len - 1, len(ids)):
        assert tournament.is_repeated(ids[:length], 0) != fresh[length - ngram_len + 1]
    found = detect(ids.tolist(), key, 97)
    assert found.num_counted == int(fresh.sum())
    weights = np.linspace(10, 1, 12) / np.linspace(10, 1, 12).sum()
    assert found.score == pytest.approx(float((bits[fresh] @ weights).mean()))


def test_p_of_green_tokens_is_that_of_a_binomial_distribution() -> None:
    for count, share in ((1, 0.5), (30, 0.25), (500, 0.9)):
        for least in {0, 1, count // 2, count}:
            exact = sum(
                math.comb(count, number) * share**number * (1 - share) ** (count - number)
                for number in range(least, count + 1)
            )
            assert binomial_tail(least, count, share) == pytest.approx(exact, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["kgw", "synthid"])
def test_p_of_texts_without_a_mark_is_uniform(scheme: str) -> None:
    """Kolmogorov and Smirnov's distance, at the level 0.001, over keys. A number of green tokens is discrete, so its p
    is drawn between that of the number and that of the next one."""
    dice, values = random.Random(5), []
    for _ in range(120):
        key: KGWKey | SynthIDKey = KGWKey(hashing_key=dice.randrange(1, 2**63))
        if scheme == "synthid":
            key = SynthIDKey(keys=tuple(dice.sample(range(2**16), 20)))
        found = detect([dice.randrange(1000) for _ in range(60)], key, 1000)
        p_value = found.p_value
        if scheme == "kgw":
            above = binomial_tail(round(found.score * found.num_counted) + 1, found.num_counted, 0.25)
            p_value = above + dice.random() * (p_value - above)
        values.append(p_value)
    values.sort()
    distance = max(max(value - n / 120, (n + 1) / 120 - value) for n, value in enumerate(values))
    assert distance < 1.95 / math.sqrt(120)


@pytest.mark.parametrize(
    ("key", "least"),
    [
        (KGWKey(hashing_key=1), 2),
        (KGWKey(hashing_key=1, context_width=4), 5),
        (KGWKey(hashing_key=HASHING_KEY, context_width=4, seeding_scheme="selfhash"), 4),
        (SynthIDKey(keys=(1, 2), ngram_len=6), 6),
    ],
)
def test_a_text_that_is_too_short_is_refused(key: KGWKey | SynthIDKey, least: int) -> None:
    for length in (0, least - 1):
        with pytest.raises(ValueError, match=f"too short: it has {length} tokens, and {least} are needed"):
            detect([5] * length, key, 10)
    assert detect([5] * least, key, 10).num_counted == 1


def test_a_token_outside_of_the_vocabulary_is_refused() -> None:
    for token_id in (-1, 10):
        with pytest.raises(ValueError, match="outside of the vocabulary"):
            detect([1, token_id, 2], new_key("kgw"), 10)
