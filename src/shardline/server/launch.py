"""The life of a server process: bind, start the engine, serve, drain, end.

The HTTP library and the application are imported only once the engine's processes have been started: they load side by
side.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from shardline import __version__
from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.log import configure_logging

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from shardline.api.async_llm import AsyncLLM
    from shardline.server.service import Service

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_KEEP_ALIVE_SECONDS = 60
_DEATH_GRACE_SECONDS = 1.0
"""Time for streams to report the engine's death themselves, before they are stopped."""
_FLUSH_SECONDS = 5
"""Time for clients to take what was written last, before their connections are cut."""


def run_server(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    start_llm: Callable[[EngineConfig], AsyncLLM] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT, or until the engine dies; `start_llm` is for tests.

    A first signal lets running requests finish, for at most `shutdown_timeout` seconds; a second one ends them at once.

    Returns:
        The process's exit code: 0 after a signal, 1 where the engine failed.

    Raises:
        ValueError: the configuration is at fault, or the address cannot be listened on; nothing was loaded then.
    """
    configure_logging()
    check_tls(server_config)
    started = time.monotonic()
    with contextlib.closing(bind(server_config.host, server_config.port)) as listener:
        if start_llm is None:
            from shardline.api.async_llm import AsyncLLM

            start_llm = AsyncLLM
        llm = start_llm(engine_config)
        return _run_loop(_serve(llm, server_config, listener, started))


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, listening not yet.

    Raises:
        ValueError: the address cannot be listened on; the message says why.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ValueError(f"--host {host}: there is no such address ({error})") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Bound alone, the port could still be shared with another process that has not begun to listen.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port (0: any free one) or --host"
        ) from error
    return listener


def check_tls(config: ServerConfig) -> None:
    """Raises:
    ValueError: the TLS certificate and key cannot be used.
    """
    if config.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile, _no_password)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"--ssl-certfile {config.ssl_certfile} and --ssl-keyfile {config.ssl_keyfile} cannot be used: {error}"
        ) from error


def _no_password() -> str:
    raise ValueError("the key of --ssl-keyfile is encrypted; save it without a password")


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """The URL under which clients on this machine reach the server."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _serve(llm: AsyncLLM, config: ServerConfig, listener: socket.socket, started: float) -> int:
    from shardline.server.app import create_app

    stop = _Stop()
    try:
        app = create_app(llm, config)
        server = _http_server(app, config)
        with stop.listening():
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                return await _live(llm, app, stop, url_of(listener, config), started)
            finally:
                server.should_exit = True
                await serving
    finally:
        await llm.close()


async def _live(llm: AsyncLLM, app: FastAPI, stop: _Stop, url: str, started: float) -> int:
    """From start-up to the last answer; the exit code."""
    from shardline.server.service import engine_dead

    service: Service = app.state.service
    loading = asyncio.create_task(llm.wait_ready())
    stopping = asyncio.create_task(stop.first.wait())
    try:
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return 0
        error = loading.exception()
        if isinstance(error, RuntimeError):
            logger.error("the engine failed to start: %s", error)
            return 1
        if error is not None:
            raise error
        for line in llm.report:
            logger.info("%s", line)
        name = service.model_names[0]
        seconds = time.monotonic() - started
        logger.info("Shardline %s: startup complete in %.1f s, serving %s at %s", __version__, seconds, name, url)
        while not stop.first.is_set() and llm.state() != "dead":
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(stopping), _POLL_SECONDS)
        if not stop.first.is_set():
            await service.in_flight.wait_empty(_DEATH_GRACE_SECONDS)
            service.in_flight.interrupt(engine_dead(llm.dead_reason))
            logger.error("the engine has stopped: %s", llm.dead_reason)
            return 1
        return await _drain(llm, service, stop)
    finally:
        for task in (loading, stopping):
            task.cancel()
        await asyncio.gather(loading, stopping, return_exceptions=True)


async def _drain(llm: AsyncLLM, service: Service, stop: _Stop) -> int:
    """Let running requests finish, then end those that have not; the exit code."""
    from shardline.server.service import draining

    llm.drain()
    timeout = service.config.shutdown_timeout
    running = len(service.in_flight)
    if running:
        logger.info(
            "shutting down: %d running request(s) get %g s to finish; interrupt again to end them now", running, timeout
        )
    emptied = asyncio.create_task(service.in_flight.wait_empty(timeout))
    hurried = asyncio.create_task(stop.second.wait())
    await asyncio.wait({emptied, hurried}, return_when=asyncio.FIRST_COMPLETED)
    for task in (emptied, hurried):
        task.cancel()
    ended = service.in_flight.interrupt(draining())
    if ended:
        logger.warning("ended %d request(s) that had not finished", ended)
    return 1 if llm.state() == "dead" else 0


class _Stop:
    """The signals that end a server: the first asks it to, the second presses."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT for as long as the block runs."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._take)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _take(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _http_server(app: FastAPI, config: ServerConfig) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn without its signal handlers: this module has its own, which drain."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=config.uvicorn_log_level,
            access_log=False,
            server_header=False,
            root_path=config.root_path,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )
    )


def _run_loop(main: Coroutine[Any, Any, int]) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
