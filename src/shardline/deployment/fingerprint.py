"""A name for what a request's tokens depend on: for system_fingerprint, and to see that replicas agree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from shardline.deployment.deployment import Deployment

NUMERICS_VERSION = 5
"""Changes whenever the same request may get other bits than before; part of the fingerprint."""

_SAMPLE_BYTES = 1 << 20


def fingerprint(deployment: Deployment, kernel_path: str) -> str:
    """Equal fingerprints, equal tokens: weights, what was made of the configuration, numerics and `kernel_path`.

    Reads samples of the weight files.
    """
    model, grid = deployment.model, deployment.grid
    digest = hashlib.blake2b(digest_size=6)
    dummy_seed = model.seed if model.load_format == "dummy" else None
    digest.update(weights_fingerprint(model.config_text, map(Path, model.weight_files), dummy_seed).encode())
    # The spec has the rope tables, which may follow max_model_len.
    digest.update(repr(deployment.spec).encode())
    layout = f"tp{grid.tensor}" + ("-ep" if deployment.expert_parallel else "")
    numerics = f"n{NUMERICS_VERSION}" if deployment.numerics == "exact" else f"fast-{layout}"
    cache = "" if deployment.cache.dtype == deployment.dtype else f"-kv-{deployment.cache.dtype}"
    label = deployment.weight_format.open_format().label
    return f"sl-{digest.hexdigest()}-{deployment.dtype}{f'-{label}' if label else ''}{cache}-{numerics}-{kernel_path}"


def weights_fingerprint(config_text: str, weight_files: Iterable[Path], dummy_seed: int | None = None) -> str:
    """16 hex digits that name a model: a hash of its config.json, with sorted keys, and of each weight file's size,
    first and last MiB (which hold the safetensors header) and 16 samples of 4 KiB between, in order of file name.

    Two fine-tunes of one model differ almost everywhere, so the samples tell them apart; a change of a few bytes in
    the middle of a file may go unseen. `dummy_seed` stands for the weights where there are none.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(config_text.encode())
    digest.update(f"dummy {dummy_seed}".encode())
    for file in sorted(weight_files):
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
