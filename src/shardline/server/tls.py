"""The server's TLS certificate: tried before the start, and read again when its files change."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl

from shardline.config.server import ServerConfig

LOOK_SECONDS = 10.0
"""Between two looks at the files."""
logger = logging.getLogger(__name__)


def check_tls(config: ServerConfig) -> None:
    """Try the TLS certificate and key, the authorities and the ciphers.

    Raises:
        ValueError: they cannot be used.
    """
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if config.ssl_ciphers is not None:
            context.set_ciphers(config.ssl_ciphers)
    except ssl.SSLError as error:
        raise ValueError(f"--ssl-ciphers {config.ssl_ciphers} cannot be used: {error}") from error
    _load_files(config, context)


def _load_files(config: ServerConfig, context: ssl.SSLContext) -> None:
    assert config.ssl_certfile is not None
    try:
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"--ssl-ca-certs {config.ssl_ca_certs} cannot be used: {error}") from error
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, _no_password)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"--ssl-certfile {config.ssl_certfile} and --ssl-keyfile {config.ssl_keyfile} cannot be used: {error}; "
            "give a certificate and its private key, both in PEM form"
        ) from error


def _no_password() -> str:
    raise ValueError("the key of --ssl-keyfile is encrypted; save it without a password")


async def refresh_tls(config: ServerConfig, context: ssl.SSLContext | None) -> None:
    """With --enable-ssl-refresh, let new connections use changed files, until the task is cancelled.

    Files that cannot be used change nothing, and the log says why.
    """
    if context is None or not config.enable_ssl_refresh:
        return
    seen = _stamps(config)
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        found = _stamps(config)
        if found == seen:
            continue
        seen = found
        try:
            check_tls(config)
            _load_files(config, context)
        except ValueError as error:
            logger.error("the TLS certificate stays as it is: %s", error)
        else:
            logger.info("read the TLS certificate from %s again", config.ssl_certfile)


def _stamps(config: ServerConfig) -> list[int | None]:
    """When each file was changed; None: it is not there."""
    stamps: list[int | None] = []
    for path in (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs):
        try:
            stamps.append(os.stat(path or "").st_mtime_ns)
        except OSError:
            stamps.append(None)
    return stamps
