"""The folder in which ranks keep blocks of the KV cache: its files by key, and the secret of their keys."""

from __future__ import annotations

import contextlib
import os
import secrets
from hashlib import blake2b
from pathlib import Path

from shardline.config.topology import RankPlace
from shardline.deployment.deployment import Deployment

KEY_BYTES = 18
"""Of `engine.tiers.content_key`."""
_SECRET_BYTES = 32
_SECRET = "secret"
ANY_BLOCK = f"{'[0-9a-f]' * 32}/pp*-cp*-tp*/[0-9a-f][0-9a-f]/*"
"""The files of all ranks of all layouts, below the folder; see `rank_folder` and `block_path`."""
_FORM = 1
"""Changes whenever the content of a block has another form for the same layout."""


def cache_secret(deployment: Deployment) -> bytes:
    """The secret of a deployment's caches, with which the keys of cached prefixes begin: of its folder, or a new one.

    Raises:
        ValueError: the folder cannot be used.
    """
    folder = deployment.cache.tier.folder
    return folder_secret(Path(folder)) if folder else secrets.token_bytes(_SECRET_BYTES)


def folder_secret(folder: Path) -> bytes:
    """The secret with which the keys of a folder's blocks begin, so that they are equal after a restart, and for all
    servers that share the folder. Makes the folder and the secret if they are not there.

    Raises:
        ValueError: the folder cannot be used.
    """
    path = folder / _SECRET
    try:
        if not path.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = folder / f"{_SECRET}-{secrets.token_hex(8)}"
            temporary.touch(0o600)
            temporary.write_bytes(secrets.token_bytes(_SECRET_BYTES))
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)  # of several servers that start together, the first one decides
            temporary.unlink()
        secret = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"kv_offloading_dir {folder} cannot be used: {error.strerror}; name a folder that this user may write, or "
            "leave it out"
        ) from None
    if len(secret) != _SECRET_BYTES:
        raise ValueError(
            f"kv_offloading_dir {folder} has a file `{_SECRET}` of {len(secret)} bytes, which is none of ours: name "
            "another folder, or remove the file"
        )
    return secret


def layout_digest(deployment: Deployment) -> bytes:
    """16 bytes that name the form of blocks: what a rank's part of a block depends on beside the key, which names the
    numeric contract."""
    cache, grid = deployment.cache, deployment.grid
    form = (
        _FORM,
        deployment.device,
        grid.tensor,
        grid.context,
        deployment.stages,
        cache.dtype,
        cache.block_size,
        cache.groups,
        cache.latents_shared,
    )
    return blake2b(repr(form).encode(), digest_size=16).digest()


def rank_folder(root: Path, layout: bytes, place: RankPlace) -> Path:
    """Where a rank keeps its parts of blocks. Replicas share the folders of their ranks."""
    return root / layout.hex() / f"pp{place.pp_rank}-cp{place.cp_rank}-tp{place.tp_rank}"


def block_path(folder: Path, key: bytes) -> Path:
    """The file of a rank's part of a block."""
    name = key.hex()
    return folder / name[:2] / name[2:]


def key_of(subfolder: str, name: str) -> bytes | None:
    """The key whose file has this name; None: it is no such file."""
    if len(name) != 2 * KEY_BYTES - 2:
        return None
    with contextlib.suppress(ValueError):
        return bytes.fromhex(subfolder + name)
    return None
