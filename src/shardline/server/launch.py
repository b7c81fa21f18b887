"""The life of a server process: bind the port, start the engine, serve, drain, end.

The HTTP library and the application are imported after the engine's processes have been started, so that both load at
the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import ipaddress
import logging
import mmap
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardline import __version__, env
from shardline.checkpoints.package import usual_names
from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.config.vllm import note_variables
from shardline.limits import raise_file_limit
from shardline.log import configure_logging
from shardline.server.keys import ApiKeys
from shardline.server.tls import check_tls, refresh_tls
from shardline.server.user_middleware import load_middleware
from shardline.stop_signals import stop_signals

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from shardline.api.async_llm import AsyncLLM
    from shardline.server.service import Service


logger = logging.getLogger(__name__)

_DEATH_GRACE_SECONDS = 1.0
"""After the engine's death, streams have this long to report it themselves before they are stopped."""
_FLUSH_SECONDS = 5
"""Clients have this long to read the last bytes before their connections are closed."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_MMAP_BYTES = 256 << 10
_TRIM_BYTES = 512 << 10
LOOK_SECONDS = 10.0
"""Between two looks at how much memory this process has."""
_LONG_PAUSE = 30.0
"""The same after memory could not be given back."""
_GROWTH, _USELESS = 1.05, 0.99


def run_server(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    *,
    start_llm: Callable[[EngineConfig], AsyncLLM] | None = None,
) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP arrives or the engine dies; `start_llm` is for tests.

    After a first signal, running requests have `shutdown_timeout` seconds to finish; a second signal ends them at once.

    Returns:
        The exit code of the process: 0 after a signal, 1 if the engine failed.

    Raises:
        ValueError: the configuration is at fault, or the server cannot listen on the address; nothing was loaded.
    """
    configure_logging()
    for line in note_variables(env.vllm_variables()):
        logger.info("%s", line)
    raise_file_limit()
    bound_heap()
    if server_config.receipts and engine_config.parallel.numerics != "exact":
        raise ValueError("--receipts needs --numerics exact: otherwise bits depend on the batch and the layout")
    names = server_config.served_model_name or usual_names(engine_config.model.model)
    if taken := next((one.name for one in engine_config.lora.modules if one.name in names), None):
        raise ValueError(f"lora_modules: {taken!r} is the name of the served model; give the adapter another name")
    check_tls(server_config)
    ApiKeys(server_config)  # a file that cannot be used is refused before anything is loaded
    load_middleware(server_config)
    started = time.monotonic()
    with contextlib.closing(open_listener(server_config)) as listener, contextlib.ExitStack() as ending:
        ending.callback(gc.enable)
        gc.disable()  # until it is ready: imported and loaded objects stay alive, and scanning them would take a tenth
        if start_llm is None:
            from shardline.api.async_llm import AsyncLLM

            start_llm = AsyncLLM
            if server_config.render_only:
                from shardline.api.renderer import Renderer

                start_llm = partial(AsyncLLM, connect=Renderer)
        llm = start_llm(engine_config)
        return run_event_loop(_serve(llm, server_config, listener, started))


def open_listener(config: ServerConfig) -> socket.socket:
    """A socket that listens where the configuration says.

    Raises:
        ValueError: the server cannot listen there; the message says why.
    """
    if config.uds is None:
        return bind_listener(config.host, config.port)
    if not config.uds:
        raise ValueError("--uds is empty: give the path of a socket, or leave it out to listen on --host and --port")
    listener = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(config.uds).st_mode):
                _refuse_if_served(config.uds)
                os.unlink(config.uds)  # of a server that was killed
        listener.bind(config.uds)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise ValueError(f"--uds {config.uds}: cannot listen there ({reason}); choose another path") from error
    return listener


def _refuse_if_served(path: str) -> None:
    """Raise OSError if a process listens on the socket: its clients would reach this server, or none."""
    with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(ConnectionRefusedError):
        client.settimeout(1.0)
        client.connect(path)
        raise OSError("another server listens there")


def bind_listener(host: str, port: int) -> socket.socket:
    """A socket that listens on the address.

    Raises:
        ValueError: the server cannot listen on the address; the message says why.
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
        # Until it listens, another process could bind the same port.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port (0: any free one) or --host"
        ) from error
    return listener


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """The URL at which clients on this machine reach the server."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def reach_notice(listener: socket.socket, *, has_key: bool) -> tuple[int, str] | None:
    """A line for the log, with its level, if only this machine can reach the server, or if anybody may use it."""
    if listener.family == socket.AF_UNIX:
        return None
    host = listener.getsockname()[0]
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        text = f"listening on {host} only: other machines cannot connect; pass --host 0.0.0.0 to serve them"
        return logging.INFO, text
    if has_key:
        return None
    text = f"listening on {host} without a key: whoever can connect can send requests; set --api-key or --api-key-file"
    return logging.WARNING, text


async def _serve(llm: AsyncLLM, config: ServerConfig, listener: socket.socket, started: float) -> int:
    from shardline.server.app import create_app

    stop = StopSignals(reloads=config.api_key_file is not None)
    try:
        app = create_app(llm, config)
        server = make_http_server(app, config, llm.config.parallel.num_engines)
        with stop.handled(), reload_handled(app.state.service.keys.reload, config):
            server.config.load()
            refreshing = asyncio.create_task(refresh_tls(config, server.config.ssl))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                return await _serve_until_stopped(llm, app, stop, listener, started)
            finally:
                server.should_exit = True
                refreshing.cancel()
                await serving
                if app.state.batches is not None:
                    await app.state.batches.close()
                tracer = app.state.service.observer.tracer
                if tracer is not None:
                    await asyncio.to_thread(tracer.close)
    finally:
        await llm.close()


async def _serve_until_stopped(
    llm: AsyncLLM, app: FastAPI, stop: StopSignals, listener: socket.socket, started: float
) -> int:
    """Wait for the engine, serve until a signal or the engine's death, and end; returns the exit code."""
    service: Service = app.state.service
    loading = asyncio.create_task(llm.wait_ready())
    stopping = asyncio.create_task(stop.first.wait())
    dying = asyncio.create_task(llm.wait_dead())
    trimming = asyncio.create_task(keep_heap_small())
    sampling = asyncio.create_task(service.window.run())
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
        _log_startup(llm, service, listener, time.monotonic() - started)
        tune_interpreter()
        await asyncio.wait({stopping, dying}, return_when=asyncio.FIRST_COMPLETED)
        return await (_drain(llm, service, stop) if stopping.done() else _report_death(llm, service))
    finally:
        tasks = (loading, stopping, dying, trimming, sampling)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def tune_interpreter() -> None:
    """Let collections look at new objects only, and seldom: what lives now lives on, and requests leave few cycles.
    Otherwise they take a sixth of the time in which streams are written.

    The threads that talk to engines get their turn soon: with Python's 5 ms, they kept streams waiting for 0.1 s while
    the event loop admitted a thousand prompts.
    """
    gc.freeze()
    gc.set_threshold(5_000, 20, 50)
    gc.enable()
    sys.setswitchinterval(0.0005)


def _log_startup(llm: AsyncLLM, service: Service, listener: socket.socket, seconds: float) -> None:
    for line in llm.model.report:
        logger.info("%s", line)
    parser = service.chat.tool_parser
    if service.config.tool_call_parser == "auto" and parser is not None:
        logger.info("tool calls: parser %s, chosen from the chat template", parser.__module__.split(".")[-1])
    tokenizer, keeps_text = llm.model.tokenizer, not service.config.special_tokens_in_content
    if tokenizer and service.chat.template and keeps_text and (ambiguous := tokenizer.spelled.find_ambiguous()):
        logger.warning(
            "the tokenizer cannot tell special tokens from text that spells them; in chats it becomes the tokens: %s",
            ", ".join(ambiguous[:20]),
        )
    notice = reach_notice(listener, has_key=service.keys.are_required)
    if notice is not None:
        logger.log(*notice)
    name, url = service.model_names[0], url_of(listener, service.config)
    logger.info("Shardline %s: startup complete in %.1f s, serving %s at %s", __version__, seconds, name, url)


async def _report_death(llm: AsyncLLM, service: Service) -> int:
    """Tell the clients that the engine has died; returns the exit code."""
    from shardline.server.errors import engine_dead

    await service.in_flight.wait_empty(_DEATH_GRACE_SECONDS)
    service.in_flight.interrupt(engine_dead(llm.dead_reason))
    logger.error("the engine has stopped: %s", llm.dead_reason)
    return 1


async def _drain(llm: AsyncLLM, service: Service, stop: StopSignals) -> int:
    """Let running requests finish, then end those that have not; returns the exit code."""
    from shardline.server.errors import interrupted

    service.leaving.set()
    if delay := service.config.shutdown_delay:
        logger.info("shutting down: /ready says 503, and requests are taken for %g s more", delay)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await stop.second.wait()
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
    ended = service.in_flight.interrupt(interrupted())
    if ended:
        logger.warning("ended %d request(s) that had not finished", ended)
    return 1 if llm.state() == "dead" else 0


class StopSignals:
    """SIGTERM, SIGINT and the end of the terminal: the first one drains the server, the second one ends it at once.

    `reloads`: SIGHUP means something else.
    """

    def __init__(self, reloads: bool) -> None:
        self._signals = [number for number in stop_signals() if not (reloads and number is signal.SIGHUP)]
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals while the block runs."""
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.add_signal_handler(number, self._count_signal)
        try:
            yield
        finally:
            for number in self._signals:
                loop.remove_signal_handler(number)

    def _count_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


@contextlib.contextmanager
def reload_handled(reload: Callable[[], None], config: ServerConfig) -> Iterator[None]:
    """Call `reload` on SIGHUP while the block runs, if there is a file of keys."""
    if config.api_key_file is None:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def make_http_server(app: ASGIApp, config: ServerConfig, num_engines: int) -> uvicorn.Server:
    """The HTTP server of an application, with bounds on connections; see `connections`."""
    import uvicorn

    from shardline.server.connections import BoundedHttpProtocol, HttpServer, reserved_files

    ciphers: dict[str, Any] = {} if config.ssl_ciphers is None else {"ssl_ciphers": config.ssl_ciphers}
    return HttpServer(
        uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=config.uvicorn_log_level,
            access_log=False,
            server_header=False,
            root_path=config.root_path,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            ssl_ca_certs=config.ssl_ca_certs,
            ssl_cert_reqs=config.ssl_cert_reqs,
            **ciphers,
            timeout_keep_alive=env.keep_alive_seconds(),
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        ),
        reserved_files(num_engines),
    )


def run_event_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` on the fastest event loop that is there; returns its exit code."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def bound_heap() -> None:
    """Have large blocks go back to the system when they are freed; call it before there are threads.

    Otherwise glibc raises its thresholds with the first large body, and keeps tens of megabytes for each thread.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)  # few threads allocate at a time, and each arena keeps some of its own


async def keep_heap_small() -> None:
    """Give free pages back whenever the process has grown, until the task is cancelled."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return
    least, pause = _resident_bytes(), LOOK_SECONDS
    while True:
        await asyncio.sleep(pause)
        grown = _resident_bytes()
        least, pause = min(least, grown), LOOK_SECONDS
        if grown > _GROWTH * least:
            gc.collect()  # the errors of refused requests refer to themselves, and to what was refused
            # On a thread, since it takes milliseconds; ctypes lets others run meanwhile.
            await asyncio.to_thread(libc.malloc_trim, 0)
            if _resident_bytes() > _USELESS * grown:  # the memory is in use
                pause = _LONG_PAUSE


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
