"""Connections to backends whose names hang, or have addresses that are dead."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from shardline.router import upstream as upstream_module
from shardline.router.upstream import Upstream, UpstreamError
from tests.router.backends import Backend, Site, say_name
from tests.server.test_tls import write_certificate


def resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[Any, ...]) -> None:
    """All names have these addresses."""

    async def look_up(*_: Any) -> list[tuple[Any, ...]]:
        return list(addresses)

    monkeypatch.setattr(upstream_module, "find_addresses", look_up)


def port_of(backend: Backend) -> int:
    return int(backend.url.rpartition(":")[2])


async def ready(upstream: Upstream) -> int:
    """What a backend says when it is asked whether it is ready."""
    return (await upstream.get(b"/ready", [], 60.0, 100))[0]


def test_a_look_up_that_hangs_is_the_only_one_of_its_backend(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, end = site.add_backend(), asyncio.Event()
    num_looks, problems = 0, []

    async def hang(*_: Any) -> list[Any]:
        nonlocal num_looks
        num_looks += 1
        await end.wait()
        raise socket.gaierror(socket.EAI_AGAIN, "no name server")

    async def main() -> int:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        upstream = Upstream("http://hangs.example", 0.2)
        for _ in range(2):
            with pytest.raises(UpstreamError, match=r"no connection in 0\.2 s"):
                await ready(upstream)
        waiting = asyncio.create_task(ready(upstream))
        await asyncio.sleep(0)
        end.set()
        with pytest.raises(UpstreamError, match="no name server"):
            await waiting
        resolve_to(monkeypatch, ("127.0.0.1", port_of(backend)))
        return await ready(upstream)

    monkeypatch.setattr(upstream_module, "find_addresses", hang)
    assert site.run(main()) == 200, "the next one is made"
    assert (num_looks, problems) == (1, [])


HANGING = """
import socket, time
from shardline.router.upstream import Upstream, UpstreamError, find_addresses
from shardline.server.launch import run_event_loop

known = socket.getaddrinfo

def look_up(host, *words, **options):
    if not options.get("flags") and host.startswith("hangs"):
        time.sleep(600)
    return known("127.0.0.1" if host == "known.example" else host, *words, **options)

async def main():
    for number in range(9):
        try:
            await Upstream(f"http://hangs{number}.example", 0.2).get(b"/ready", [], 1.0, 100)
        except UpstreamError as error:
            print(error)
    print(await find_addresses("known.example", 80))
    return 0

socket.getaddrinfo = look_up
run_event_loop(main())
"""


def test_nothing_waits_for_look_ups_that_hang() -> None:
    """Neither those of other names nor the end of the process."""
    ended = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=100, check=True)
    assert ended.stdout.splitlines() == [*["no connection in 0.2 s"] * 9, "[('127.0.0.1', 80)]"]
    assert ended.stderr == ""


@contextlib.contextmanager
def silent_address() -> Iterator[tuple[str, int]]:
    """An address that takes no connection and refuses none."""
    with contextlib.ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):  # more than it holds
            client = open_sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()


@pytest.mark.parametrize("is_silent", [False, True])
def test_dead_addresses_of_a_name_are_passed_over(site: Site, monkeypatch: pytest.MonkeyPatch, is_silent: bool) -> None:
    living = ("127.0.0.1", port_of(site.add_backend()))
    with silent_address() as silent:
        dead = silent if is_silent else ("::1", 1, 0, 0)
        resolve_to(monkeypatch, dead, living)
        assert site.run(ready(Upstream("http://two.example", 2.0))) == 200
        resolve_to(monkeypatch, dead)
        with pytest.raises(UpstreamError, match="no connection in 0.5 s" if is_silent else r"no connection \("):
            site.run(ready(Upstream("http://one.example", 0.5)))


def test_certificates_are_of_the_name_and_not_of_the_address(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = write_certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(str(config.ssl_certfile), str(config.ssl_keyfile))
    backend = Backend("b0", say_name)
    site.run(backend.serve(tls=tls))
    site.backends.append(backend)
    resolve_to(monkeypatch, ("::1", 1, 0, 0), ("127.0.0.1", port_of(backend)))
    assert site.run(ready(Upstream("https://localhost", 60.0, config.ssl_certfile))) == 200
    with pytest.raises(UpstreamError, match="CERTIFICATE_VERIFY_FAILED"):
        site.run(ready(Upstream("https://other.example", 60.0, config.ssl_certfile)))


def test_link_local_addresses_keep_their_scopes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = []

    async def connect(_: Any, __: Any, host: str, port: int, **___: Any) -> None:
        hosts.append((host, port))
        raise OSError("far away")

    resolve_to(monkeypatch, ("fe80::1", 80, 0, socket.if_nametoindex("lo")))
    monkeypatch.setattr(uvloop.Loop, "create_connection", connect)
    with pytest.raises(UpstreamError, match="far away"):
        site.run(ready(Upstream("http://link.example", 60.0)))
    assert hosts == [("fe80::1%lo", 80)]


def test_an_attempt_that_is_cancelled_leaves_no_connection(site: Site) -> None:
    """Not even one that waits for the other side's part of TLS."""

    async def main() -> bytes:
        taken: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        server = await asyncio.start_server(lambda *streams: taken.put_nowait(streams), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            attempt = asyncio.create_task(ready(Upstream(f"https://localhost:{port}", 60.0)))
            reader, writer = await taken.get()
            with contextlib.closing(writer):
                first = await reader.read(1)  # TLS has begun
                attempt.cancel()
                await asyncio.wait([attempt])
                return first + await reader.read()

    assert site.run(main())
