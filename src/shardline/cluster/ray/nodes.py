"""The front's handle on nodes that Ray places: a driver process, and what it has reserved."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import queue
import secrets
import socket
import threading
from collections.abc import Callable

import msgspec

from shardline import env
from shardline.channel import Channel
from shardline.cluster.ray.placing import config_of_node
from shardline.config.engine import EngineConfig
from shardline.engine.children import Child
from shardline.messages.node import DriverFailed, DriverToFront, NodesPresent, Placed, StartDriver

_PLACE_SECONDS = 300.0
_RESTART_SECONDS = 5.0
_END_SECONDS = 10.0

_log = logging.getLogger(__name__)


class RayNodes:
    """Reservations in a Ray cluster for all ranks of a configuration.

    `config` names the nodes that Ray has chosen, and `ranks` has the number of ranks of each; the first is this host.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Have Ray reserve all that is needed, and start the nodes' processes.

        Raises:
            ValueError: Ray is not installed, cannot be joined, or is too small; or the configuration is at fault.
            RuntimeError: Ray has failed.
        """
        if config.cluster.has_nodes:
            raise ValueError("Ray chooses the nodes; leave --nnodes and --data-parallel-address out")
        check_installed()
        self.token = secrets.token_urlsafe(32)
        """The join token of this launch. The user's own never goes through Ray."""
        self._failure: DriverFailed | None = None
        self._on_failure: Callable[[DriverFailed], None] | None = None
        self._asked = config
        self._closing = threading.Event()
        self._answers: queue.SimpleQueue[Placed | DriverFailed] = queue.SimpleQueue()
        self._groups: tuple[int, ...] = ()
        self._present = NodesPresent((), ())
        self._start_driver()
        placed = self._await_placed()
        self._groups = placed.groups
        self.ranks = tuple(count * placed.group_size for count in placed.groups)
        self.config = config_of_node(config, 0, len(placed.groups), placed.address)
        if placed.gpus is not None:
            env.adopt_gpus(placed.gpus)
        threading.Thread(target=self._keep_driver, name="ray-watch", daemon=True).start()

    def watch(self, on_failure: Callable[[DriverFailed], None]) -> None:
        """Have `on_failure` called, perhaps on another thread, if the nodes cannot run."""
        self._on_failure = on_failure
        if self._failure is not None:
            on_failure(self._failure)

    def note_present(self, message: NodesPresent) -> None:
        """Tell the driver which nodes have joined the head."""
        self._present = NodesPresent(message.hosts, ())
        with contextlib.suppress(OSError):  # a driver that starts again is told then
            self._channel.send(self._present)

    def close(self) -> None:
        """End the driver, and with it what still runs in the reservations."""
        self._closing.set()
        self._channel.shutdown()
        self._driver.end(_END_SECONDS)

    def _start_driver(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._driver = Child("shardline.cluster.ray.driver", [theirs.fileno()])
        self._channel: Channel[DriverToFront] = Channel(ours, DriverToFront)  # type: ignore[arg-type]
        self._channel.send(StartDriver(self._asked, self.token, self._groups))
        threading.Thread(target=self._read, args=(self._channel,), name="ray-reader", daemon=True).start()

    def _await_placed(self) -> Placed:
        try:
            answer = self._answers.get(timeout=_PLACE_SECONDS)
        except queue.Empty:
            self.close()
            raise RuntimeError(f"Ray did not place the nodes within {_PLACE_SECONDS:g} s") from None
        except BaseException:
            self.close()
            raise
        if isinstance(answer, Placed):
            return answer
        self.close()
        raise (ValueError if answer.user_error else RuntimeError)(answer.message)

    def _read(self, channel: Channel[DriverToFront]) -> None:
        try:
            while True:
                message = channel.receive()
                if isinstance(message, DriverFailed) and self._groups:
                    self._failure = message
                    if self._on_failure is not None:
                        self._on_failure(message)
                elif not self._groups:
                    self._answers.put(message)
        except (EOFError, OSError, msgspec.MsgspecError):
            if not self._groups:
                self._answers.put(DriverFailed("the Ray driver process has ended; its log is above", user_error=False))

    def _keep_driver(self) -> None:
        """Starts the driver again when it has ended, for example because the Ray cluster has ended."""
        while not self._closing.wait(1.0):
            if self._driver.poll() is None:
                continue
            _log.error("the Ray driver process %s; it starts again", self._driver.describe_end())
            if self._closing.wait(_RESTART_SECONDS):
                return
            self._channel.close()
            self._start_driver()
            self.note_present(self._present)


def check_installed() -> None:
    """Check that Ray can be imported.

    Raises:
        ValueError: it cannot; the message says how to install it.
    """
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        raise ValueError("distributed_executor_backend ray needs Ray; install it: pip install 'shardline[ray]'")
