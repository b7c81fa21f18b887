"""The join token: the secret that all nodes of a cluster share, and where it is found."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from shardline import env
from shardline.config.cluster import ClusterConfig

_LEAST_CHARS = 22
"""128 bits in base64."""
_log = logging.getLogger(__name__)


def own_token_file() -> Path:
    """Where the head keeps its token unless the user names a file."""
    return Path.home() / ".config" / "shardline" / "join-token"


def find_token(config: ClusterConfig) -> str:
    """The token: of --join-token-file, else of SHARDLINE_JOIN_TOKEN, else of the own file, which a head creates.

    Raises:
        ValueError: there is none, or it is too short.
    """
    if config.join_token_file is not None:
        return _check_token(_read_file(Path(config.join_token_file)), config.join_token_file)
    if (token := env.join_token()) is not None:
        return _check_token(token, "SHARDLINE_JOIN_TOKEN")
    file = own_token_file()
    if not file.exists():
        if config.is_headless:
            raise ValueError(
                f"this node has no join token; copy {file} of the head to the same place here, or set "
                "SHARDLINE_JOIN_TOKEN or --join-token-file"
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as created:
            created.write(secrets.token_urlsafe(32) + "\n")
        _log.warning(
            "a new join token is in %s; copy it to each other node: ssh NODE mkdir -p .config/shardline && "
            "scp -p %s NODE:.config/shardline/",
            file,
            file,
        )
    return _check_token(_read_file(file), str(file))


def _read_file(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the join token {file} cannot be read: {error}") from error


def _check_token(token: str, place: str) -> str:
    if len(token) < _LEAST_CHARS:
        raise ValueError(
            f"the join token of {place} has {len(token)} characters and needs {_LEAST_CHARS}; "
            "`openssl rand -base64 24` makes one"
        )
    return token
