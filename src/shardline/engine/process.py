"""The engine process: messages from the front in, outputs out, the step loop between."""

from __future__ import annotations

import logging
import select
import signal
import socket
import sys
import time
import traceback

from shardline.channel import Channel
from shardline.config.engine import EngineConfig
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.engine.executor.base import Executor, ExecutorFailure
from shardline.engine.ipc import (
    AbortRequests,
    AddRequests,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    FrontMessage,
    StartEngine,
    StopEngine,
)
from shardline.engine.report import startup_report
from shardline.log import configure_logging
from shardline.runtime.loader.fingerprint import weights_fingerprint
from shardline.runtime.setup import NUMERICS_VERSION, prepare

_log = logging.getLogger(__name__)


class EngineProcess:
    """Serves one front over one channel until either side ends."""

    def __init__(self, channel: Channel[FrontMessage]) -> None:
        self._channel = channel
        self._stopping = False

    def run(self) -> None:
        """Start, serve, end; every failure is told to the front in words."""
        executor: Executor | None = None
        try:
            start = self._channel.receive()
            assert isinstance(start, StartEngine)
            began = time.perf_counter()
            setup = prepare(start.config)
            executor = make_executor(setup)
            ranks = executor.start()
            isas = {report.isa for report in ranks}
            if len(isas) > 1:
                raise ValueError(f"ranks run unlike kernel paths ({', '.join(sorted(isas))}); set SHARDLINE_ISA")
            engine = Engine(setup, executor)
            dummy_seed = start.config.model.seed if start.config.model.load_format == "dummy" else None
            fingerprint = _fingerprint(start.config, weights_fingerprint(setup.files, dummy_seed), isas.pop())
            seconds = {"weights": max(rank.load_seconds for rank in ranks), "engine": time.perf_counter() - began}
            self._channel.send(
                EngineReady(
                    max_model_len=setup.max_model_len,
                    num_kv_blocks=setup.num_blocks - 1,
                    block_size=setup.config.cache.block_size,
                    fingerprint=fingerprint,
                    report=startup_report(setup, ranks, seconds),
                )
            )
            self._serve(engine, executor)
        except EOFError:
            _log.debug("the front has ended")
        except Exception as error:
            self._tell(error)
        finally:
            if executor is not None:
                executor.close()

    def _serve(self, engine: Engine, executor: Executor) -> None:
        while not self._stopping:
            if not engine.busy:
                ready, _, _ = select.select([self._channel.fileno(), *executor.watched()], [], [])
                if ready != [self._channel.fileno()]:
                    executor.check()
            self._take_messages(engine)
            outputs = engine.step()
            if outputs:
                self._channel.send(EngineOutputs(outputs, engine.stats()))

    def _take_messages(self, engine: Engine) -> None:
        while not self._stopping and select.select([self._channel.fileno()], [], [], 0)[0]:
            message = self._channel.receive()
            if isinstance(message, AddRequests):
                for request in message.requests:
                    engine.add(request)
            elif isinstance(message, AbortRequests):
                engine.abort(message.request_ids)
                # The gauges must show the blocks that came back even if no step follows.
                self._channel.send(EngineOutputs([], engine.stats()))
            elif isinstance(message, StopEngine):
                self._stopping = True

    def _tell(self, error: Exception) -> None:
        expected = isinstance(error, (ValueError, ExecutorFailure))
        if not expected:
            _log.error("the engine failed\n%s", traceback.format_exc())
        message = str(error) if expected else f"the engine failed: {type(error).__name__}: {error}"
        try:
            self._channel.send(EngineFailed(message, user_error=isinstance(error, ValueError)))
        except OSError:
            _log.error("%s", message)


def _fingerprint(config: EngineConfig, weights: str, isa: str) -> str:
    numerics = f"n{NUMERICS_VERSION}" if config.parallel.numerics == "exact" else "fast"
    return f"sl-{weights[:12]}-{config.model.dtype}-{numerics}-{isa}"


def main() -> None:
    """`python -m shardline.engine.process FD`: serve the front at the other end of this socket."""
    # The terminal's ctrl-C reaches the whole process group; the front decides when engines end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging()
    sock = socket.socket(fileno=int(sys.argv[1]))
    EngineProcess(Channel(sock, FrontMessage)).run()  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
