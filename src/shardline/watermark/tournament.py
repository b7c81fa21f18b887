"""The secret bits of SynthID's tournament (g-values): those of transformers' SynthIDTextWatermarkLogitsProcessor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardline.watermark.green_lists import Ints, twister_draws
from shardline.watermark.keys import SynthIDKey

Bits = npt.NDArray[np.uint8]
_MULTIPLIER = 6364136223846793005
_INCREMENT = 1


class Tournament:
    """What a key says about n-grams. Hashes are int64 and wrap around."""

    def __init__(self, key: SynthIDKey) -> None:
        self.context_size = key.ngram_len - 1
        """Tokens before a token that decide its bits."""
        self._history = key.context_history_size
        self._keys = np.array(key.keys, dtype=np.int64)
        self._table = (twister_draws(key.sampling_table_seed, key.sampling_table_size) & 1).astype(np.uint8)
        self.share_of_ones = float(self._table.mean())
        """Of the bits of any text without the mark, as the key meets it by chance."""

    def hash_contexts(self, token_ids: Ints) -> Ints:
        """The hashes of all contexts in a text [N]: int64 [N - context_size + 1], each of tokens that follow each
        other."""
        hashes = np.ones(len(token_ids) - self.context_size + 1, dtype=np.int64)
        for first in range(self.context_size):
            hashes = _accumulate(hashes, token_ids[first : first + len(hashes)])
        return hashes

    def bits(self, contexts: Ints, token_ids: Ints) -> Bits:
        """The bits [N, layers] of tokens [N] after contexts [N], or after one context [1], given by their hashes."""
        ngrams = _accumulate(contexts, token_ids)
        return self._table[_accumulate(ngrams[:, None], self._keys[None, :]) % len(self._table)]

    def find_repeated(self, contexts: Ints) -> npt.NDArray[np.bool_]:
        """Which contexts [N], given by their hashes, are among the `context_history_size` ones before them."""
        last: dict[int, int] = {}
        repeated = np.zeros(len(contexts), dtype=np.bool_)
        for index, context in enumerate(contexts.tolist()):
            repeated[index] = index - last.get(context, -self._history - 1) <= self._history
            last[context] = index
        return repeated

    def is_repeated(self, token_ids: Ints, first: int) -> bool:
        """Whether the context at the end of a text [N] is among the earlier ones of the answer, which begins at
        `first`."""
        start = max(first, self.context_size, len(token_ids) - self._history) - self.context_size
        contexts = self.hash_contexts(token_ids[start:])
        return bool((contexts[:-1] == contexts[-1]).any())


def _accumulate(hashes: Ints, data: Ints) -> Ints:
    """One step of the linear congruential generator that hashes n-grams."""
    return (hashes + data) * np.int64(_MULTIPLIER) + np.int64(_INCREMENT)
