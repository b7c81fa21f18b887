"""The server's TLS certificate."""

from __future__ import annotations

import asyncio
import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shardline.config.server import ServerConfig
from shardline.server import tls
from shardline.server.tls import check_tls, refresh_tls


def write_certificate(folder: Path) -> ServerConfig:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    start = datetime.datetime(2020, 1, 1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, start, start + datetime.timedelta(36500))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    form = serialization.PrivateFormat.PKCS8
    (folder / "key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    (folder / "cert").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return ServerConfig(ssl_certfile=str(folder / "cert"), ssl_keyfile=str(folder / "key"), enable_ssl_refresh=True)


def test_files_and_ciphers_are_tried(tmp_path: Path) -> None:
    config = write_certificate(tmp_path)
    check_tls(replace(config, ssl_ca_certs=config.ssl_certfile, ssl_cert_reqs=2, ssl_ciphers="ECDHE+AESGCM"))
    with pytest.raises(ValueError, match="--ssl-ciphers nothing cannot be used"):
        check_tls(replace(config, ssl_ciphers="nothing"))
    with pytest.raises(ValueError, match=r"--ssl-ca-certs .*/key cannot be used"):
        check_tls(replace(config, ssl_ca_certs=config.ssl_keyfile))


class FakeContext:
    """What the server's context is asked to load."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def load_cert_chain(self, certificate: str, *_: Any) -> None:
        self.loaded.append(Path(certificate).read_text())


def test_changed_files_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "LOOK_SECONDS", 0.001)
    config, context = write_certificate(tmp_path), FakeContext()

    async def main() -> None:
        refreshing = asyncio.create_task(refresh_tls(config, context))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        assert context.loaded == []
        (tmp_path / "cert").write_text("broken")
        await asyncio.sleep(0.05)
        assert context.loaded == []
        write_certificate(tmp_path)
        while not context.loaded:
            await asyncio.sleep(0.001)
        refreshing.cancel()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert context.loaded[-1] == (tmp_path / "cert").read_text()
