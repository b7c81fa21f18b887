"""The keys that clients must send, and what needs them. A file of keys can be changed while the server runs."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardline.config.server import ServerConfig

if TYPE_CHECKING:
    from shardline.server.errors import ApiError

_SECRET = secrets.token_bytes(32)
logger = logging.getLogger(__name__)


class ApiKeys:
    """The valid keys of a server. Only their digests are kept.

    Raises:
        ValueError: the file of keys cannot be read, or it has no usable key.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._own = _digests(config.keys)
        self._admin = _digests(() if config.admin_api_key is None else (config.admin_api_key,))
        self._file = config.api_key_file
        self._from_file: list[bytes] = [] if self._file is None else _read_keys(self._file)
        self.are_required = bool(self._own) or self._file is not None
        """Whether clients need a key at all."""
        self.has_admin = bool(self._admin)
        """Whether administration needs a key of its own."""

    def check(self, authorization: str, *, admin: bool) -> ApiError | None:
        """Why a request that needs a key, or with `admin` the key for administration, is refused; None: it is not.

        `authorization`: its header, which has the key as bearer token.
        """
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return _unauthorized(
                "You didn't provide an API key. You need to provide your API key in an Authorization header using "
                "Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
            )
        if not self.is_valid(key.strip(), admin=admin):
            return _unauthorized("Incorrect API key provided.", "invalid_api_key")
        return None

    def is_valid(self, key: str, *, admin: bool) -> bool:
        """Whether a key is valid, or, with `admin`, whether it is the key for administration.

        That one is valid for everything.
        """
        digest = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        valid = self._admin if admin else [*self._own, *self._from_file, *self._admin]
        # Every key is compared in constant time, so that the time tells nothing about the keys.
        return any([hmac.compare_digest(digest, valid_digest) for valid_digest in valid])  # noqa: C419

    def reload(self) -> None:
        """Read the file of keys again. If that fails, the keys stay as they are, and the log says why."""
        if self._file is None:
            return
        try:
            self._from_file = _read_keys(self._file)
        except ValueError as error:
            logger.error("the keys stay as they are: %s", error)
            return
        logger.info("read %d key(s) from %s", len(self._from_file), self._file)


def _unauthorized(message: str, code: str | None = None) -> ApiError:
    from shardline.server.errors import ApiError  # the HTTP library: keys are read before it is imported

    return ApiError(401, message, code=code)


def owner_of(key: str) -> str:
    """A name for who has a key. It tells nothing about the key."""
    return hashlib.blake2b(key.encode("utf-8", "replace"), key=_SECRET, digest_size=12).hexdigest()


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [hashlib.sha256(key.encode()).digest() for key in keys]


def _read_keys(path: str) -> list[bytes]:
    """The digests of the keys in a file: one key a line; empty lines and lines that begin with # do not count."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file: cannot read {path!r} ({type(error).__name__})") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ValueError(f"--api-key-file: {path!r} has no key; write one on each line")
    for number, key in enumerate(keys, 1):
        if not (key.isascii() and key.isprintable()):
            raise ValueError(f"--api-key-file: key {number} in {path!r} is not printable ASCII")
    return _digests(keys)


PAGE_PREFIX = "/ui/"
"""Where the page's files are."""

ADMIN_PREFIXES = ("/requests", "/router", "/server_info", "/reset_prefix_cache", "/v1/load_lora", "/v1/unload_lora")
"""Paths of administration."""
