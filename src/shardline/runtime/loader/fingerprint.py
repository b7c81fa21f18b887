"""A name for a model's weights that changes when they change: for system_fingerprint, prefix-cache keys. No torch."""

from __future__ import annotations

import hashlib
import json

from shardline.runtime.loader.hub import ModelFiles

_SAMPLE_BYTES = 1 << 20


def weights_fingerprint(files: ModelFiles, dummy_seed: int | None = None) -> str:
    """16 hex digits that name a model: a hash of its config.json and of each weight file's size, first and last MiB
    (which hold the safetensors header) and 16 samples of 4 KiB between, in order of file name.

    Two fine-tunes of one model differ almost everywhere, so the samples tell them apart; a change of a few bytes in
    the middle of a file may go unseen. `dummy_seed` stands for the weights where there are none.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(json.dumps(files.config, sort_keys=True).encode())
    digest.update(f"dummy {dummy_seed}".encode())
    for file in sorted(files.weight_files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for offset, count in _samples(size):
                stream.seek(offset)
                digest.update(stream.read(count))
    return digest.hexdigest()


def _samples(size: int) -> list[tuple[int, int]]:
    """(offset, count) of the sampled bytes of a file of `size` bytes."""
    if size <= 2 * _SAMPLE_BYTES:
        return [(0, size)]
    between = [(size * part // 17, 4096) for part in range(1, 17)]
    return [(0, _SAMPLE_BYTES), *between, (size - _SAMPLE_BYTES, _SAMPLE_BYTES)]
