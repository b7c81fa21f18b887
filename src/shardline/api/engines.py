"""The engine processes behind one front: how they are started, awaited and closed together."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from shardline.config.engine import EngineConfig
from shardline.deployment.block_folder import cache_secret
from shardline.limits import describe_shortage
from shardline.messages.engine import EngineFailed, EngineOutputs, EngineReady
from shardline.messages.request import Request

if TYPE_CHECKING:
    from shardline.cluster.cluster import Cluster
    from shardline.cluster.ray.nodes import RayNodes
    from shardline.deployment.deployment import Deployment

_POLL_SECONDS = 0.2
_FIRST_PAUSE = 1.0
"""Seconds between a restart that fails and the next one; each further pause is twice as long."""
_LONGEST_PAUSE = 60.0

_log = logging.getLogger(__name__)


class Client(Protocol):
    """The handle on one replica; the real one is shardline.engine.client.EngineClient."""

    def wait_ready(self, timeout: float | None = None) -> EngineReady: ...
    def add(self, requests: Sequence[Request]) -> None: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def close(self, timeout: float = 10.0) -> None: ...


@dataclasses.dataclass(frozen=True)
class EngineRestarted:
    """An engine has started again, and can take requests through `client`."""

    client: Client


@dataclasses.dataclass(frozen=True)
class RestartFailed:
    """An engine could not start again."""

    message: str


EngineEvent = EngineOutputs | EngineFailed | EngineRestarted | RestartFailed

Connect = Callable[[EngineConfig, int, Callable[[EngineEvent], None]], Client]
"""Starts the replica with this number, and calls the callable with its events, on a thread of its own."""


class Engines:
    """One engine for each replica, or for each set of replicas in lockstep.

    `config` is the configuration that they run, and `clients` are the handles on them.
    """

    def __init__(
        self, config: EngineConfig, on_event: Callable[[int, EngineEvent], None], connect: Connect | None = None
    ) -> None:
        """Start all engines, without waiting for them.

        If `connect` is None, the configuration is resolved first, and the engines are real ones.

        Raises:
            ValueError: the configuration is invalid; nothing was started.
        """
        self._ray: RayNodes | None = None
        self._cluster: Cluster | None = None
        self._deployment: Deployment | None = None
        if connect is None:
            connect, config = self._deploy(config)
        self.config = config
        self.clients: list[Client] = []
        self._connect = connect
        self._is_exact = config.parallel.numerics == "exact"
        self._on_event = on_event
        self.ready: list[EngineReady] = []
        """What each engine has said at its last start; empty while they start."""
        self._open: list[Client] = []
        self._ending = threading.Event()
        self._closing = threading.Lock()
        self._pauses = [0.0] * config.parallel.num_engines
        """Seconds before the next start of each engine that could not start again."""
        try:
            for index in range(config.parallel.num_engines):
                client = connect(config, index, partial(on_event, index))
                self.clients.append(client)
                self._open.append(client)
        except BaseException:
            self.close()
            raise

    @property
    def deployment(self) -> Deployment | None:
        """What runs where; None: `connect` was given."""
        return self._deployment if self._cluster is None else self._cluster.deployment

    def wait_ready(self) -> list[EngineReady]:
        """Block until every engine is ready; may run on another thread, before any request is sent.

        Raises:
            ValueError: the configuration is at fault.
            RuntimeError: a replica failed, or the replicas would give different answers.
        """
        with ThreadPoolExecutor(len(self.clients), "wait-ready") as pool:
            waits = [pool.submit(self._wait_ready, client) for client in self.clients]
            try:
                done, _ = wait(waits, return_when=FIRST_EXCEPTION)
            except BaseException:  # ctrl-C: closing the clients also ends the threads that wait for them
                self.close()
                raise
            failed = [error for error in (future.exception() for future in done) if error is not None]
            if failed:
                first = next((error for error in failed if isinstance(error, ValueError)), failed[0])
                self.close(*_as_exit(first))
        if failed:
            raise first
        ready = [future.result() for future in waits]
        if len({replica.fingerprint for replica in ready}) > 1:
            prints = ", ".join(f"replica {index}: {replica.fingerprint}" for index, replica in enumerate(ready))
            if self._is_exact:
                error = RuntimeError(f"the replicas would give different answers ({prints})")
                self.close(*_as_exit(error))
                raise error
            _log.warning("the replicas may give different answers (%s)", prints)
        if self._cluster is not None:
            last = msgspec.structs.replace(ready[-1], report=[*ready[-1].report, *self._cluster.describe_links()])
            ready[-1] = last
        self.ready = list(ready)
        return ready

    def restart_engine(self, index: int, failed: Client) -> None:
        """Start engine `index` again, on a thread of its own; EngineRestarted or RestartFailed tells the result."""
        name = f"restart-{index}"
        threading.Thread(target=self._restart_engine, args=(index, failed), name=name, daemon=True).start()

    def close(self, code: int = 0, why: str = "") -> None:
        """End the processes of all engines; may be called again, and from any thread.

        Other nodes end with the exit code `code`, and log why.
        """
        with self._closing:
            self._ending.set()
            clients, self._open = self._open, []
            if clients:
                with ThreadPoolExecutor(len(clients), "close") as pool:
                    list(pool.map(lambda client: client.close(), clients))
        if self._cluster is not None:
            self._cluster.close(code, why)
        if self._ray is not None:
            self._ray.close()

    def _restart_engine(self, index: int, failed: Client) -> None:
        failed.close()
        while not self._ending.wait(self._pauses[index]):
            error = self._await_hosts(index)
            if error is None:
                if (error := self._start_again(index, failed)) is None:
                    self._pauses[index] = 0.0
                    return
                if self._cluster is not None and not self._cluster.has_hosts(index):
                    continue  # a host was lost meanwhile, which is not the replica's failure
            self._pauses[index] = pause = min(_LONGEST_PAUSE, 2 * self._pauses[index] or _FIRST_PAUSE)
            if describe_shortage(error) is None:
                self._on_event(index, RestartFailed(str(error)))
                return
            if not self._ending.is_set():  # what is lacking may come back, however often the replica has failed
                _log.warning("replica %d is tried again in %g s", index, pause)

    def _await_hosts(self, index: int) -> Exception | None:
        """Wait until the hosts of an engine are there. Returns why they are not, or None."""
        try:
            if self._cluster is not None:
                self._cluster.await_hosts(index)
        except (OSError, RuntimeError) as error:
            _log_failure(index, error)
            return error
        return None

    def _start_again(self, index: int, failed: Client) -> Exception | None:
        """Start an engine in the place of one that has failed. Returns why it could not, or None."""
        announced = threading.Event()

        def deliver_event(event: EngineEvent) -> None:
            announced.wait()  # the new engine's events follow the news that it is there
            self._on_event(index, event)

        client = None
        try:
            with self._closing:
                if self._ending.is_set():
                    return None
                if failed in self._open:
                    self._open.remove(failed)
                client = self._connect(self.config, index, deliver_event)
                self._open.append(client)
            ready = self._wait_ready(client)
            if ready.fingerprint != (was := self.ready[index].fingerprint):
                raise RuntimeError(f"it would give different answers ({was}, now {ready.fingerprint})")
            self.ready[index] = ready
        except (OSError, RuntimeError, ValueError) as error:
            # Closing awaits the engine's processes, and the log must not wait for them.
            if not self._ending.is_set():
                _log_failure(index, error)
            if client is not None:
                client.close()
                with self._closing:
                    if client in self._open:
                        self._open.remove(client)
            return error.with_traceback(None)  # its frames hold descriptors
        self._on_event(index, EngineRestarted(client))
        announced.set()
        return None

    def _wait_ready(self, client: Client) -> EngineReady:
        # Waits are short, since a client that is closed meanwhile may never answer.
        while client in self._open:
            with contextlib.suppress(TimeoutError):
                return client.wait_ready(_POLL_SECONDS)
        raise RuntimeError("the engine was closed while it started")

    def _deploy(self, config: EngineConfig) -> tuple[Connect, EngineConfig]:
        """What starts the engines of a deployment, and the configuration with its model named by the found folder,
        and with the prefix cache only if there is one.

        Raises:
            ValueError: the configuration cannot be.
            RuntimeError: nodes are missing.
        """
        from shardline.deployment.here import resolve_here
        from shardline.engine.client import EngineClient
        from shardline.engine.start import StartedEngine, start_engine

        if config.places_with_ray:
            from shardline.cluster.ray.nodes import RayNodes

            self._ray = RayNodes(config)
            config = self._ray.config
        start: Callable[[Deployment, int, bytes], StartedEngine] = start_engine
        try:
            if config.cluster.has_nodes:
                from shardline.cluster.cluster import Cluster

                self._cluster = Cluster(config, self._ray)
                deployment = self._cluster.launch(resolve_here(config, self._cluster.machine))
                start = self._cluster.start_engine
            else:
                deployment = resolve_here(config)
            secret = cache_secret(deployment)
        except BaseException as error:
            if self._cluster is not None:
                self._cluster.close(*_as_exit(error))
            if self._ray is not None:
                self._ray.close()
            raise

        self._deployment = deployment

        def connect(config: EngineConfig, index: int, on_event: Callable[[EngineEvent], None]) -> Client:
            assert self.deployment is not None
            return EngineClient(self.deployment, index, on_event, start, secret)

        model = dataclasses.replace(config.model, model=deployment.model.folder)
        cache = dataclasses.replace(config.cache, enable_prefix_caching=deployment.cache.prefix_caching)
        return connect, dataclasses.replace(config, model=model, cache=cache)


def _log_failure(index: int, error: Exception) -> None:
    shortage = describe_shortage(error)
    why = str(error) if shortage is None else f"{error}: {shortage}"
    _log.error("replica %d could not start again: %s", index, why)


def _as_exit(error: BaseException) -> tuple[int, str]:
    """The exit code of all nodes after an error of the head, and what they log."""
    return (2 if isinstance(error, ValueError) else 1), f"{error}" if isinstance(error, Exception) else ""
