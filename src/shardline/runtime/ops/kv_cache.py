"""Writing new keys and values into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from shardline import _cpu
from shardline.runtime.ops.dispatch import kernels


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Stores key and value [T, Hk, D] at slots [T] (int64) of the caches [num_blocks, Hk, block_size, D].

    slot = block_id * block_size + offset; a negative slot is skipped. The token stride of key and value is free.
    """
    kernels(key).write_kv(key, value, key_cache, value_cache, slots)


def write_kv_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    block_size = key_cache.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, :, slot % block_size] = key[token]
            value_cache[slot // block_size, :, slot % block_size] = value[token]


def write_latent(latent: Tensor, rope_key: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Stores latent [T, R] and rope_key [T, P] at slots [T] (int64) of a cache [num_blocks, block_size, R + P].

    Slots are as in `write_kv`; the strides of tokens are free.
    """
    _cpu.write_latent(latent, rope_key, cache, slots)


def write_latent_reference(latent: Tensor, rope_key: Tensor, cache: Tensor, slots: Tensor) -> None:
    rows = cache.view(-1, cache.shape[2])
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            rows[slot] = torch.cat([latent[token], rope_key[token]])
