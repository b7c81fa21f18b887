"""The engine process: its start, and how its front learns of every failure. `serve.py` is what it does between."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence

from shardline.channel import Channel
from shardline.deployment.fingerprint import numeric_contract
from shardline.deployment.kv_budget import max_concurrency
from shardline.engine.engine import Engine
from shardline.engine.executor import make_executor
from shardline.engine.executor.base import Executor, ExecutorFailure
from shardline.engine.prefixes import cache_namespace
from shardline.engine.report import check_known_answers, startup_report
from shardline.engine.serve import EngineServer
from shardline.engine.speculative.ranks import DraftRanks
from shardline.log import configure_logging
from shardline.messages.engine import EngineFailed, EngineReady, FrontMessage, StartEngine
from shardline.process_title import set_process_title
from shardline.segment.pulse import start_pulse

_log = logging.getLogger(__name__)


class EngineProcess:
    """Starts an engine for one front, and serves it over one channel until either side ends."""

    def __init__(self, channel: Channel[FrontMessage], streams: Sequence[int] = ()) -> None:
        """`streams`: the descriptors of the sockets that lead to the ranks on other hosts, in their order."""
        self._channel = channel
        self._streams = streams
        self._ready = False
        self._executor: Executor | None = None
        self._draft_ranks: DraftRanks | None = None
        self._engine: Engine | None = None

    def run(self) -> None:
        """Start, serve and end; the front gets every failure as a message for people."""
        try:
            start = self._channel.receive()
            assert isinstance(start, StartEngine)
            set_process_title(f"{start.deployment.role} engine {start.replica}".strip())
            gc.disable()  # almost nothing is garbage while loading; collections would take a tenth of the time
            began = time.perf_counter()
            deployment = start.deployment.seen_from(start.deployment.placements[start.replica][0].host)
            streams = dict(zip(deployment.remote_ranks(start.replica), self._streams, strict=True))
            self._executor = executor = make_executor(deployment, start.replica, streams)
            if deployment.drafting is not None:
                self._draft_ranks = DraftRanks(deployment.drafting)  # they load meanwhile
            ranks = executor.start()
            isas = {report.isa for report in ranks}
            if len(isas) > 1 and deployment.numerics == "exact":
                fix = "set SHARDLINE_ISA, use equal GPUs, or --numerics fast"
                raise ValueError(f"ranks run unlike kernel paths ({', '.join(sorted(isas))}); {fix}")
            check_known_answers(ranks)
            contract = numeric_contract(deployment, "+".join(sorted(isas)))
            namespace = cache_namespace(contract.fingerprint, start.secret)
            report_of_draft = [] if self._draft_ranks is None else self._draft_ranks.wait_ready()
            self._engine = engine = Engine(deployment, executor, namespace, start.replica, self._draft_ranks)
            seconds = {"weights": max(rank.load_seconds for rank in ranks), "engine": time.perf_counter() - began}
            self._channel.send(
                EngineReady(
                    max_model_len=deployment.max_model_len,
                    block_size=deployment.cache.block_size,
                    contract=contract,
                    max_concurrency=max_concurrency(deployment, executor.allocation),
                    report=[
                        *startup_report(deployment, start.replica, executor.allocation, ranks, seconds),
                        *(f"draft model: {line}" for line in report_of_draft),
                    ],
                    ranks=ranks,
                )
            )
            self._ready = True
            gc.freeze()
            gc.enable()
            EngineServer(self._channel, engine, executor).run()
        except Exception as error:
            # Reading a file or a rank may raise the same errors as reading the front.
            if isinstance(error, (EOFError, OSError)) and self._channel.peer_has_ended():
                _log.debug("the front has ended")
            else:
                self._tell(error)
        finally:
            if self._engine is not None:
                self._engine.close()
            if self._executor is not None:
                self._executor.close()
            if self._draft_ranks is not None:
                self._draft_ranks.close()

    def _tell(self, error: Exception) -> None:
        user_error = isinstance(error, ValueError) and not self._ready
        expected = user_error or isinstance(error, ExecutorFailure)
        if not expected or error.__cause__ is not None:
            _log.error("the engine failed\n%s", traceback.format_exc())
        message = str(error) if expected else f"the engine failed: {type(error).__name__}: {error}"
        try:
            failed = EngineFailed(message, user_error=user_error, suspicious=True)
            if isinstance(error, ExecutorFailure):
                failed = EngineFailed(
                    message, host_lost=error.host_lost, suspicious=error.suspicious, stalled_for=error.stalled_for
                )
            self._channel.send(failed)
        except OSError:
            _log.error("%s", message)


def main() -> None:
    """Serve the front.

    The arguments are descriptors: of the front's socket, of the sockets that lead to ranks on other hosts, and of the
    pulse.
    """
    # Ctrl-C, a closed terminal and a service manager's SIGTERM reach the whole process group; the front decides when
    # engines end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    front, *streams, pulse = map(int, sys.argv[1:])
    start_pulse(pulse)
    configure_logging()
    process = EngineProcess(Channel(socket.socket(fileno=front), FrontMessage), streams)  # type: ignore[arg-type]
    process.run()


if __name__ == "__main__":
    main()
