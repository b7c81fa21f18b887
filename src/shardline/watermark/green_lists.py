"""Which tokens are green after a context: the lists of transformers' WatermarkLogitsProcessor on a CPU.

A list is the first part of `torch.randperm(vocab_size)`, whose generator is seeded by a hash of the context. torch
seeds a 32-bit Mersenne twister, and shuffles forwards: step i swaps place i with place i + (draw modulo what is left).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shardline.watermark.keys import KGWKey

Ints = npt.NDArray[np.int64]
_HASH_TABLE_SIZE = 1_000_003
_SEED_MODULUS = 2**64 - 1
_SEED_BITS = 0xFFFFFFFF


class GreenLists:
    """The green lists of a key over a vocabulary."""

    def __init__(self, key: KGWKey, vocab_size: int) -> None:
        self._key = key
        self._vocab_size = vocab_size
        self.size = int(vocab_size * key.greenlist_ratio)
        """Number of tokens in a list."""
        self.hashes_itself = key.seeding_scheme == "selfhash"
        """Whether the next token is the last one of its own context."""
        self.context_width = key.context_width - self.hashes_itself
        """How many tokens before the next one make an n-gram with it."""

    def seed(self, context: Sequence[int] | Ints) -> int:
        """The 32-bit seed of the list after a context [context_width]; with `hashes_itself`, the next token is its end.

        The sums and products wrap around at 64 bits, as those of transformers' tensors do.
        """
        if not self.hashes_itself:
            return self._key.hashing_key * int(context[-1]) % _SEED_MODULUS & _SEED_BITS
        hashes = _hash_table(self._key.hashing_key)[np.asarray(context, dtype=np.int64) % _HASH_TABLE_SIZE] + 1
        products = np.array([self._key.hashing_key]) * hashes * hashes[-1:]
        return int(products.min()) % _SEED_MODULUS & _SEED_BITS

    def is_green(self, context: Sequence[int] | Ints, token_id: int) -> bool:
        """Whether a token is green after a context [context_width], which does not have the token itself."""
        seeded = [*context, token_id] if self.hashes_itself else context
        places = _shuffle(self.seed(seeded), self._vocab_size, self.size)
        place, step = token_id, 0
        # The token is at `place`. A step before that number may take it to the front, and that step moves it on.
        while True:
            if (places[step : min(place, self.size)] == place).any():
                return True
            if place >= self.size:
                return False
            if places[place] == place:
                return True
            step, place = place + 1, int(places[place])


def twister_draws(seed: int, count: int) -> Ints:
    """The first 32-bit draws of torch's generator on a CPU."""
    twister = np.random.MT19937()
    twister._legacy_seeding(seed & _SEED_BITS)
    draws: Ints = twister.random_raw(count).astype(np.int64)
    return draws


def _shuffle(seed: int, size: int, num_steps: int) -> Ints:
    """The places with which the first steps of `torch.randperm(size)` swap theirs."""
    steps = np.arange(num_steps)
    places: Ints = twister_draws(seed, num_steps) % (size - steps) + steps
    return places


@lru_cache(maxsize=4)
def _hash_table(hashing_key: int) -> Ints:
    """`torch.randperm` of the hash table's size; it takes some tenths of a second."""
    table = list(range(_HASH_TABLE_SIZE))
    for step, place in enumerate(_shuffle(hashing_key, _HASH_TABLE_SIZE, _HASH_TABLE_SIZE - 1).tolist()):
        table[step], table[place] = table[place], table[step]
    return np.array(table, dtype=np.int64)
