"""Whether a text has the watermark of a key: a score, and how likely a text without it has such a score.

Each n-gram counts once, because a repeated one is no new evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from shardline.watermark import Scheme
from shardline.watermark.green_lists import GreenLists
from shardline.watermark.keys import KGWKey, SynthIDKey, WatermarkKey
from shardline.watermark.tournament import Tournament

_FIRST_WEIGHT, _LAST_WEIGHT = 10.0, 1.0
"""Of the layers of a tournament: the first ones decide most."""


class Detection(msgspec.Struct, frozen=True):
    """What the detector finds in a text."""

    scheme: Scheme
    num_tokens: int
    num_counted: int
    """Tokens of different n-grams: the evidence."""
    score: float
    """kgw: the green share of the tokens that count; synthid: the weighted mean of their bits."""
    expected: float
    """The score of a text without the mark, on average."""
    z_score: float
    """How many standard deviations the score is above that."""
    p_value: float
    """The probability that a text without the mark has at least this score, over all keys."""


def detect(token_ids: Sequence[int], key: WatermarkKey, vocab_size: int) -> Detection:
    """Look for a key's mark in the tokens of an answer.

    Leave out the prompt and the tokens that begin and end every text. `vocab_size` is that of the model's
    configuration.

    Raises:
        ValueError: a token is outside of the vocabulary, or the text is too short.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"the text has a token outside of the vocabulary, which has {vocab_size} tokens")
    context = key.ngram_len - 1 if isinstance(key, SynthIDKey) else GreenLists(key, vocab_size).context_width
    if len(ids) <= context:
        raise ValueError(f"the text is too short: it has {len(ids)} tokens, and {context + 1} are needed at least")
    if isinstance(key, KGWKey):
        return _detect_green(ids.tolist(), key, vocab_size)
    return _detect_bits(ids, key)


def _detect_green(token_ids: list[int], key: KGWKey, vocab_size: int) -> Detection:
    """The score of Kirchenbauer et al., equation 3, as transformers' WatermarkDetector has it."""
    lists, ratio = GreenLists(key, vocab_size), key.greenlist_ratio
    width = lists.context_width
    ngrams = {tuple(token_ids[end - width : end + 1]) for end in range(width, len(token_ids))}
    count = len(ngrams)
    num_green = sum(lists.is_green(ngram[:-1], ngram[-1]) for ngram in ngrams)
    return Detection(
        scheme="kgw",
        num_tokens=len(token_ids),
        num_counted=count,
        score=num_green / count,
        expected=ratio,
        z_score=(num_green - ratio * count) / math.sqrt(count * ratio * (1 - ratio)),
        p_value=binomial_tail(num_green, count, ratio),
    )


def _detect_bits(token_ids: np.ndarray, key: SynthIDKey) -> Detection:
    """The weighted mean of Dathathri et al. (2024), appendix A, as a standard normal variable."""
    tournament = Tournament(key)
    contexts = tournament.hash_contexts(token_ids[:-1])
    fresh = ~tournament.find_repeated(contexts)
    bits = tournament.bits(contexts[fresh], token_ids[tournament.context_size :][fresh])
    count, depth = bits.shape
    weights = np.linspace(_FIRST_WEIGHT, _LAST_WEIGHT, depth)
    weights /= weights.sum()
    score, share = float((bits @ weights).mean()), tournament.share_of_ones
    z_score = (score - share) / math.sqrt(share * (1 - share) * float((weights**2).sum()) / count)
    return Detection(
        scheme="synthid",
        num_tokens=len(token_ids),
        num_counted=count,
        score=score,
        expected=share,
        z_score=z_score,
        p_value=math.erfc(z_score / math.sqrt(2)) / 2,
    )


def binomial_tail(least: int, count: int, share: float) -> float:
    """The probability of at least `least` successes in `count` trials, each with the probability `share`."""
    logs = [
        math.lgamma(count + 1)
        - math.lgamma(number + 1)
        - math.lgamma(count - number + 1)
        + number * math.log(share)
        + (count - number) * math.log1p(-share)
        for number in range(least, count + 1)
    ]
    return min(1.0, math.fsum(map(math.exp, logs)))
