"""The front's handle on a cluster: its nodes as a machine, and the start of engines on any of them."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from shardline.channel import Channel
from shardline.cluster.describe import describe_node, own_address
from shardline.cluster.links import describe_links, used_links
from shardline.cluster.wire import find_token
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment
from shardline.deployment.machine import Machine
from shardline.engine.children import Child
from shardline.engine.start import StartedEngine, start_engine
from shardline.messages.engine import StartEngine
from shardline.messages.node import (
    ENGINE,
    HeadFailed,
    HeadToFront,
    Join,
    Joined,
    Launch,
    LinkMeasured,
    Measured,
    NodesPresent,
    Shutdown,
    StartHead,
    Stream,
)
from shardline.segment.pulse_watch import CHECK_INTERVAL

if TYPE_CHECKING:
    from shardline.cluster.ray.nodes import RayNodes


_MAX_FDS = 64
"""Descriptors that one message carries."""


class HeadProcess:
    """One head process, from its start to its end."""

    def __init__(self) -> None:
        """Start the process. It imports its modules, and then waits for `listen`."""
        ours, theirs = socket.socketpair()
        self._sockets, passed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, passed:
            self._child = Child("shardline.cluster.head", [theirs.fileno(), passed.fileno()])
        self._channel: Channel[HeadToFront] = Channel(ours, HeadToFront)  # type: ignore[arg-type]

    def listen(self, command: StartHead, on_message: Callable[[HeadToFront], None], on_end: Callable[[], None]) -> None:
        """Have the process listen and wait for nodes. A thread hands on its news; `on_end`: none will follow."""
        self.send(command)
        threading.Thread(target=self._read, args=(on_message, on_end), name="head-reader", daemon=True).start()
        threading.Thread(target=self._watch, name="head-watch", daemon=True).start()

    def send(self, message: object) -> None:
        """Send the process a message.

        Raises:
            OSError: it has ended.
        """
        self._channel.send(message)

    def attach(self, ends: dict[Stream, socket.socket]) -> None:
        """Hand over local ends of streams; the process has the nodes start what is at the far ends."""
        pairs = list(ends.items())
        for first in range(0, len(pairs), _MAX_FDS):
            part = pairs[first : first + _MAX_FDS]
            names = msgspec.msgpack.encode([stream for stream, _ in part])
            with contextlib.suppress(OSError):  # a head process that has ended ends the streams too
                socket.send_fds(self._sockets, [names], [sock.fileno() for _, sock in part])
        for _, sock in pairs:
            sock.close()

    @property
    def has_ended(self) -> bool:
        return self._child.poll() is not None

    def describe_end(self) -> str:
        """How the process has ended, for people."""
        return self._child.describe_end()

    def disconnect(self) -> None:
        """Close both connections; the process ends."""
        self._channel.close()
        self._sockets.close()

    def end(self, timeout: float) -> None:
        """Wait until the process ends, and kill it after `timeout` seconds."""
        self._child.end(timeout)

    def _read(self, on_message: Callable[[HeadToFront], None], on_end: Callable[[], None]) -> None:
        try:
            while True:
                on_message(self._channel.receive())
        except (EOFError, OSError, msgspec.MsgspecError):
            on_end()

    def _watch(self) -> None:
        """End a process that gives no sign of life."""
        while not self.has_ended:
            if self._child.is_silent():
                self._child.kill()
                self._channel.shutdown()
                return
            time.sleep(CHECK_INTERVAL)


_LINKS_SECONDS = 2.0

_log = logging.getLogger(__name__)


class Cluster:
    """Nodes that have joined. Several threads may start engines; `close` ends all nodes."""

    def __init__(self, config: EngineConfig, ray: RayNodes | None = None) -> None:
        """Start the head, and wait until all nodes have joined. `ray`: the nodes, if Ray has chosen them.

        Raises:
            ValueError: the configuration is at fault.
            RuntimeError: nodes are missing after --join-timeout.
        """
        self._config = config
        self._ray = ray
        self._token = find_token(config.cluster) if ray is None else ray.token
        self._head = HeadProcess()
        try:
            self._own = describe_node(config, own_address(config.cluster))
        except BaseException:
            self._head.disconnect()
            self._head.end(1.0)
            raise
        self._deployment: Deployment | None = None
        self._lock = threading.Lock()
        self._starts = 0
        self._closed = False
        self._present = threading.Condition()
        self._hosts: frozenset[int] = frozenset()
        self._links: dict[tuple[int, int], Measured] = {}
        self._joined: queue.SimpleQueue[Joined | HeadFailed] = queue.SimpleQueue()
        self._listen()
        if ray is not None:
            ray.watch(lambda failed: self._joined.put(HeadFailed(failed.message, failed.user_error)))
        joins = (self._own, *self._await_nodes())
        ranks = (0,) * len(joins) if ray is None else ray.ranks
        self.machine = Machine(
            tuple(msgspec.structs.replace(join.host, num_ranks=count) for join, count in zip(joins, ranks, strict=True))
        )
        """The hosts of all nodes; the head's is the first."""
        self._models = tuple(join.model for join in joins)

    def launch(self, deployment: Deployment) -> Deployment:
        """Tell all nodes what runs where; returns the deployment with the model's places on them."""
        self._deployment = msgspec.structs.replace(deployment, host_models=self._models)
        self._head.send(Launch(self._deployment))
        return self._deployment

    @property
    def deployment(self) -> Deployment:
        """What runs where now: nodes that come back may be on other hosts."""
        assert self._deployment is not None, "the cluster launches before it starts anything"
        return self._deployment

    def start_engine(self, deployment: Deployment, engine: int, secret: bytes) -> StartedEngine:
        """Start an engine on its host, and connect it with its ranks on other hosts. `secret`: see `StartEngine`."""
        with self._lock:
            self._starts += 1
            start = self._starts
            if deployment.placements[engine][0].host == 0:
                started = start_engine(deployment, engine, secret)
                self._head.attach({Stream(engine, rank, start): sock for rank, sock in started.streams.items()})
                return started
            ours, theirs = socket.socketpair()
            self._head.attach({Stream(engine, ENGINE, start): theirs})
            with contextlib.suppress(OSError):  # its host is lost; what can be read from the socket says so
                Channel(ours, StartEngine).send(StartEngine(deployment, engine, secret))
            return StartedEngine(None, ours, {})

    def describe_links(self) -> list[str]:
        """Lines about the links between hosts, as they were measured at the launch; waits some seconds for the last."""
        assert self._deployment is not None, "the cluster launches before it reports"
        expected = len(used_links(self._deployment))
        with self._present:
            self._present.wait_for(lambda: self._closed or len(self._links) >= expected, _LINKS_SECONDS)
            return describe_links(self._deployment, dict(self._links))

    def close(self, code: int = 0, why: str = "") -> None:
        """End all nodes with an exit code. They log why; empty: the code alone says it."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(OSError):
                self._head.send(Shutdown(code, why or ("the head was stopped" if code == 0 else "the head has failed")))
            self._head.end(3.0)
            self._head.disconnect()
        with self._present:
            self._present.notify_all()

    def _listen(self) -> None:
        """Have the head process listen and wait for nodes."""
        cluster, replicas = self._config.cluster, self._config.parallel.data_parallel_size
        by_replicas = cluster.data_parallel_address is not None
        nodes = () if by_replicas else tuple(range(1, cluster.nnodes))
        address, port = self._own.host.address, cluster.head_port
        command = StartHead(self._token, address, port, self._own, nodes, replicas if by_replicas else 0)
        self._head.listen(command, self._handle, partial(self._note_end, self._head))

    def _await_nodes(self) -> tuple[Join, ...]:
        timeout = self._config.cluster.join_timeout
        try:
            answer = self._joined.get(timeout=timeout)
        except queue.Empty:
            self.close(1)
            raise RuntimeError(
                f"nodes are missing after --join-timeout {timeout:g} s; the log above names them"
            ) from None
        except BaseException:
            self.close(1)
            raise
        if isinstance(answer, HeadFailed):
            self.close(1)
            raise (ValueError if answer.user_error else RuntimeError)(answer.message)
        return answer.nodes

    def await_hosts(self, engine: int) -> None:
        """Wait until all hosts of an engine are there.

        Raises:
            RuntimeError: a host is away for longer than --join-timeout, or the cluster is closed.
        """
        hosts = self._hosts_of(engine)
        deadline = time.monotonic() + self._config.cluster.join_timeout
        while True:
            with self._lock:
                if not self._closed and self._head.has_ended:
                    self._restart_head()
            with self._present:
                if self._closed:
                    raise RuntimeError("the cluster is closed")
                if hosts <= self._hosts:
                    return
                if time.monotonic() >= deadline:
                    names = ", ".join(self.machine.hosts[host].name for host in sorted(hosts - self._hosts))
                    raise RuntimeError(f"{names} did not come back within --join-timeout")
                self._present.wait(CHECK_INTERVAL)

    def has_hosts(self, engine: int) -> bool:
        """Whether all hosts of an engine are there. Also if the cluster is closed: nobody need wait for them."""
        with self._present:
            return self._closed or self._hosts_of(engine) <= self._hosts

    def _hosts_of(self, engine: int) -> set[int]:
        return {place.host for place in self.deployment.placements[engine]}

    def _restart_head(self) -> None:
        self._head.disconnect()
        with self._present:
            self._hosts = frozenset()
        if self._ray is not None:  # a node may end before the new head has seen it
            self._ray.note_present(NodesPresent((0,), ()))
        self._head = HeadProcess()
        self._listen()
        if self._deployment is not None:
            self._head.send(Launch(self._deployment))

    def _handle(self, message: HeadToFront) -> None:
        """Take the head's news, on the thread that reads them."""
        if isinstance(message, NodesPresent):
            self._note_present(message)
        elif isinstance(message, LinkMeasured):
            with self._present:
                self._links[message.hosts] = message.measured
                self._present.notify_all()
        else:
            self._joined.put(message)

    def _note_end(self, head: HeadProcess) -> None:
        """A head process has ended. Nobody else knows whether nodes are there."""
        self._joined.put(HeadFailed("the head process has ended", user_error=False))
        # Named at once: if an engine waits for its hosts, the next one may run already, else it starts with an engine.
        if not self._closed and self._deployment is not None:
            _log.error("the head process %s; it starts again, and nodes join anew", head.describe_end())
        if head is self._head:
            with self._present:
                self._hosts = frozenset()

    def _note_present(self, message: NodesPresent) -> None:
        deployment = self._deployment
        if deployment is not None:
            for index, join in zip(message.hosts[1:], message.nodes, strict=True):
                if deployment.machine.hosts[index].address != join.host.address:
                    deployment = deployment.with_host(index, join.host, join.model)
            if deployment is not self._deployment:
                self._deployment = deployment
                self._head.send(Launch(deployment))
        if self._ray is not None:
            self._ray.note_present(message)
        with self._present:
            self._hosts = frozenset(message.hosts)
            self._present.notify_all()
