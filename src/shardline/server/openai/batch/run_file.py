"""`run-batch`: answers all requests of a file, and goes on where an earlier run was stopped."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.limits import raise_file_limit
from shardline.log import configure_logging
from shardline.server.launch import make_http_server, open_listener, url_of
from shardline.server.openai.batch.answer_log import AnswerLog, OtherAnswers
from shardline.server.openai.batch.lines import Answer, RepeatedIds, count_requests, read_lines
from shardline.stop_signals import stop_signals

if TYPE_CHECKING:
    from fastapi import FastAPI

    from shardline.api.async_llm import AsyncLLM
    from shardline.server.service import Service

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 60
_UPLOAD_TRIES = 5
_UPLOAD_PAUSE_SECONDS = 5
_STOPPED_BY_SIGNAL = 130


@dataclass(frozen=True)
class BatchFiles:
    """Where the requests are, and where the answers go: paths, or http(s) URLs.

    Raises:
        ValueError: a file or a folder is not there, or input and output are one file.
    """

    input_file: str
    output_file: str
    tmp_dir: str | None = None
    """Folder for the answers until they are uploaded. With it, an upload's run can be resumed, too."""

    def __post_init__(self) -> None:
        if not _is_url(self.input_file):
            if not os.path.exists(self.input_file) or os.path.isdir(self.input_file):
                raise ValueError(f"--input-file {self.input_file}: there is no such file")
            # Pipes and terminals may be both.
            if os.path.isfile(self.output_file) and os.path.samefile(self.input_file, self.output_file):
                raise ValueError(f"--output-file {self.output_file} is the input file; give another one")
        if not _is_url(self.output_file):
            folder = os.path.dirname(self.output_file) or "."
            if os.path.isdir(self.output_file or ".") or not os.path.isdir(folder):
                raise ValueError(f"--output-file {self.output_file}: {folder} must be a folder, and this a file in it")
        if self.tmp_dir is not None and not os.path.isdir(self.tmp_dir):
            raise ValueError(f"--output-tmp-dir {self.tmp_dir}: there is no such folder")


def _is_url(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def run_batch(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    files: BatchFiles,
    *,
    serve_metrics: bool = False,
    start_llm: Callable[[EngineConfig], AsyncLLM] | None = None,
) -> int:
    """Answer the requests of a file. `serve_metrics`: /metrics is there meanwhile, where `server_config` says.

    Returns:
        The exit code of the process: 0, 1 (lines were no requests), or 130 (a signal has stopped it).

    Raises:
        ValueError: the configuration is at fault, or the output has other answers.
        RuntimeError: the engine failed.
        OSError: a file cannot be read, written, fetched or uploaded.
    """
    configure_logging()
    raise_file_limit()
    with _open_input(files.input_file) as source, _open_output(files) as output:
        try:
            total = count_requests(source, server_config.body_limit)
        except RepeatedIds as error:
            raise ValueError(f"--input-file {files.input_file}: {error}") from error
        if total == 0:
            output.touch()
            logger.info("%s has no requests", files.input_file)
        run = _Run(server_config, source, total, output)
        code = 0 if total == 0 else asyncio.run(run.main(engine_config, serve_metrics, start_llm))
        if code != _STOPPED_BY_SIGNAL and _is_url(files.output_file):
            _upload(output, files.output_file)
    return code


@dataclass
class _Run:
    """One run over an input file."""

    config: ServerConfig
    source: BinaryIO
    total: int
    """Number of lines of the input."""
    output: Path

    async def main(
        self, engine_config: EngineConfig, serve_metrics: bool, start_llm: Callable[[EngineConfig], AsyncLLM] | None
    ) -> int:
        """Start the engine, answer what is left, and end the engine; returns the exit code."""
        if start_llm is None:
            from shardline.api.async_llm import AsyncLLM

            start_llm = AsyncLLM
        llm = start_llm(engine_config)
        log = AnswerLog(self.output)
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, stopped.set)
        try:
            from shardline.server.app import create_app

            app = create_app(llm, self.config)
            async with _metrics_served(app.state.service, self.config) if serve_metrics else contextlib.nullcontext():
                working = asyncio.create_task(self._work(app, llm, log))
                stopping = asyncio.create_task(stopped.wait())
                await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
                is_stopped = not working.done()
                for task in (working, stopping):
                    task.cancel()
                await asyncio.gather(working, stopping, return_exceptions=True)
                if is_stopped:
                    logger.warning("stopped: %s", self._what_is_left(log))
                    return _STOPPED_BY_SIGNAL
                working.result()
        finally:
            log.close()
            await llm.close()
        self._report(log)
        return 1 if log.num_broken else 0

    async def _work(self, app: FastAPI, llm: AsyncLLM, log: AnswerLog) -> None:
        from shardline.server.openai.batch.executor import BatchExecutor, BatchStopped

        await llm.wait_ready()
        for line in llm.model.report:
            logger.info("%s", line)
        self.source.seek(0)
        lines = read_lines(self.source, self.config.body_limit)
        try:
            lines = await asyncio.to_thread(log.skip_answered, lines, llm.model.fingerprint)
        except OtherAnswers as error:
            raise ValueError(f"{error}: give another --output-file, or delete this one") from error
        if log.num_answers:
            logger.info("%d of %d requests are answered already", log.num_answers, self.total)
        log.open()
        with _progress_bar(self.total, log.num_answers) as bar:

            def write(answer: Answer) -> None:
                log.append(answer)
                if not answer.is_ok:
                    bar.set_postfix_str(f"{log.num_failed} failed", refresh=False)
                bar.update()

            dying = asyncio.create_task(llm.wait_dead())
            running = asyncio.create_task(BatchExecutor(app, llm).run(lines, write))
            try:
                await asyncio.wait({dying, running}, return_when=asyncio.FIRST_COMPLETED)
                if not running.done():
                    raise RuntimeError(f"the engine has stopped: {llm.dead_reason}; {self._what_is_left(log)}")
                await running
            except BatchStopped as error:
                raise RuntimeError(f"the engine has stopped: {error}; {self._what_is_left(log)}") from error
            except OSError as error:
                raise OSError(f"cannot write {self.output}: {error.strerror}; {self._what_is_left(log)}") from error
            finally:
                for task in (dying, running):
                    task.cancel()
                await asyncio.gather(dying, running, return_exceptions=True)

    def _what_is_left(self, log: AnswerLog) -> str:
        return f"{log.num_answers} of {self.total} requests are answered; the same command goes on from there"

    def _report(self, log: AnswerLog) -> None:
        if log.num_broken:
            logger.error("%d line(s) of the input are no requests; their errors are in the output", log.num_broken)
        failed = f", {log.num_failed} of them with an error" if log.num_failed else ""
        logger.info("%d requests are answered%s", log.num_answers, failed)


def _progress_bar(total: int, done: int) -> tqdm[Any]:
    """Counts answers; on what is no terminal, it shows itself seldom."""
    pause = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, initial=done, desc="Running batch", unit=" requests", mininterval=pause, smoothing=0.05)


@contextlib.asynccontextmanager
async def _metrics_served(service: Service, config: ServerConfig) -> AsyncIterator[None]:
    """Serve the probes and /metrics while the block runs."""
    from fastapi import FastAPI
    from starlette.responses import RedirectResponse

    from shardline.server.operations import health_routes

    app = FastAPI(openapi_url=None)
    app.include_router(health_routes(service))
    app.add_route("/", lambda request: RedirectResponse("/metrics"))  # vLLM's has the metrics there, too
    with contextlib.closing(open_listener(config)) as listener:
        server = make_http_server(app, config, service.llm.config.parallel.num_engines)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        logger.info("metrics are at %s/metrics", url_of(listener, config))
        try:
            yield
        finally:
            server.should_exit = True
            await serving


@contextlib.contextmanager
def _open_input(path_or_url: str) -> Iterator[BinaryIO]:
    """The input as a file that can be read twice: what is fetched, or comes from a pipe, is copied first.

    Raises:
        OSError: it cannot be fetched or read.
    """
    if os.path.isfile(path_or_url):
        with open(path_or_url, "rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as copied:
        if _is_url(path_or_url):
            try:
                with urllib.request.urlopen(path_or_url, timeout=_CONNECT_SECONDS) as answer:
                    shutil.copyfileobj(answer, copied)
            except (urllib.error.URLError, ValueError) as error:
                raise OSError(f"--input-file {path_or_url}: cannot be fetched ({error})") from error
        else:
            try:
                with open(path_or_url, "rb") as pipe:
                    shutil.copyfileobj(pipe, copied)
            except OSError as error:
                raise OSError(f"--input-file {path_or_url}: cannot be copied ({error.strerror})") from error
        copied.seek(0)
        yield copied


@contextlib.contextmanager
def _open_output(files: BatchFiles) -> Iterator[Path]:
    """The file for the answers; those for a URL are in a file of their own until they are uploaded."""
    if not _is_url(files.output_file):
        with _locked(Path(files.output_file)):
            yield Path(files.output_file)
    elif files.tmp_dir is None:
        with tempfile.TemporaryDirectory(prefix="shardline-batch-") as folder:
            yield Path(folder) / "output.jsonl"
    else:
        # The same command finds it again.
        name = hashlib.sha256(f"{files.input_file}\n{files.output_file}".encode()).hexdigest()[:16]
        path = Path(files.tmp_dir) / f"shardline-batch-{name}.jsonl"
        with _locked(path):
            yield path
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other runs from writing the same answers meanwhile. What is no regular file is not locked.

    Raises:
        ValueError: another run writes them.
    """
    if path.exists() and not path.is_file():
        yield
        return
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run writes {path}: wait until it ends, or give another --output-file") from None
        except OSError:  # some network file systems have no locks
            logger.warning("%s cannot be locked: start no second run that writes it", path)
        yield


def _upload(path: Path, url: str) -> None:
    """Send a file by HTTP PUT.

    Raises:
        OSError: the server does not take it.
    """
    for left in reversed(range(_UPLOAD_TRIES)):
        try:
            with open(path, "rb") as file:
                headers = {"Content-Type": "application/jsonl", "Content-Length": str(path.stat().st_size)}
                request = urllib.request.Request(url, file, headers, method="PUT")
                with urllib.request.urlopen(request, timeout=_CONNECT_SECONDS):
                    logger.info("the answers are at %s", url)
                    return
        except (urllib.error.URLError, ValueError) as error:
            if not left or isinstance(error, ValueError):
                raise OSError(f"--output-file {url}: the answers cannot be uploaded ({error})") from error
            logger.warning("cannot upload to %s (%s); trying again in %d s", url, error, _UPLOAD_PAUSE_SECONDS)
            time.sleep(_UPLOAD_PAUSE_SECONDS)
