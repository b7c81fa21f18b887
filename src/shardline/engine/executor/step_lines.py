"""A connection of its own to each rank on another host, for the steps.

A rank's channel goes through the head process and its node, which add what they know of the rank. Each of them would
delay each plan and each result, so these travel on a *line*: a direct, encrypted connection.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Collection

import msgspec

from shardline.channel import Channel
from shardline.engine.executor.base import ExecutorFailure
from shardline.messages.worker import StepReply
from shardline.runtime.parallel.rendezvous import Arrivals, steps_of

FRAME_TIMEOUT = 10.0
"""Seconds without a byte after which a rank in the middle of a frame counts as gone."""
_LAST_WORDS_SECONDS = 2.0
"""Seconds in which a rank's channel tells why its line has ended; after that, the connection alone was lost."""
_CONNECT_SECONDS = 5.0


class StepLines:
    """The lines of an engine's ranks on other hosts. A rank connects before it says that it is ready."""

    def __init__(self, address: str, nonce: bytes, ranks: Collection[int]) -> None:
        """Listen on this host's IP address `address` until all of `ranks` have connected. Without ranks, do nothing."""
        self._ranks = ranks
        self._arrivals = Arrivals(address, nonce, list(map(steps_of, ranks))) if ranks else None
        self.lines: dict[int, Channel[StepReply]] = {}
        """By rank, once they are open."""
        self.fds: dict[int, int] = {}
        """The rank of each descriptor that may become readable."""
        self.ended: dict[int, float] = {}
        """When each line that has ended did so."""

    @property
    def address(self) -> str:
        """Where ranks connect; empty: there are no lines."""
        return self._arrivals.address if self._arrivals is not None else ""

    def open(self) -> None:
        """Take the connections of the ranks, all of which have said that they are ready.

        Raises:
            ExecutorFailure: a rank has not connected.
        """
        if self._arrivals is None:
            return
        found = self._arrivals.finish(time.monotonic() + _CONNECT_SECONDS)
        if missing := sorted(rank for rank in self._ranks if steps_of(rank) not in found):
            raise ExecutorFailure(f"ranks {missing} are ready, but have no connection for steps")
        for rank in self._ranks:
            sock, seal = found[steps_of(rank)]
            # A rank reads its plans at once, whatever it does. One that does not must not stop the engine.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(FRAME_TIMEOUT), 0))
            self.lines[rank] = Channel(sock, StepReply, seal)  # type: ignore[arg-type]
            self.fds[sock.fileno()] = rank

    def send(self, rank: int, body: bytes) -> None:
        """Send an encoded message. A line that has ended drops it: `find_lost` or the rank's channel tells the engine.

        Raises:
            BlockingIOError: the rank does not read.
        """
        try:
            self.lines[rank].send_encoded(body)
        except BlockingIOError:
            raise
        except OSError:
            self._note_end(rank)

    def receive(self, rank: int) -> StepReply | None:
        """The next message of a rank that has sent something; None: its line has ended."""
        try:
            return self.lines[rank].receive(FRAME_TIMEOUT)
        except (EOFError, OSError, TimeoutError, msgspec.MsgspecError):
            self._note_end(rank)
            return None

    def _note_end(self, rank: int) -> None:
        self.ended.setdefault(rank, time.monotonic())
        self.fds.pop(self.lines[rank].fileno(), None)

    def find_lost(self) -> int | None:
        """A rank whose line has ended although its channel has not told an end in time."""
        now = time.monotonic()
        return next((rank for rank, ended in self.ended.items() if now - ended >= _LAST_WORDS_SECONDS), None)

    def close(self) -> None:
        """Stop listening, and close all lines."""
        if self._arrivals is not None and not self.lines:
            for connection in self._arrivals.finish(0.0).values():
                connection.socket.close()
        for line in self.lines.values():
            line.close()
