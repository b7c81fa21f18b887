"""The socket of a head in tests, served by a thread."""

from __future__ import annotations

import queue
import selectors
import threading

from shardline.cluster import wire
from shardline.cluster.wire import FrameSocket, HeadSocket
from shardline.handshake import run_callbacks


class FakeHead:
    """Keeps what nodes send, and sends what a test wants."""

    def __init__(self, token: str, port: int) -> None:
        self.received: queue.SimpleQueue[tuple[FrameSocket, bytes]] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[FrameSocket] = queue.SimpleQueue()
        self._unsent: queue.SimpleQueue[tuple[FrameSocket, object]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._socket = HeadSocket(
            token,
            "127.0.0.1",
            port,
            self._selector,
            lambda peer, body: self.received.put((peer, body)),
            self._ended.put,
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set() or not self._unsent.empty():
            run_callbacks(self._selector, 0.01)
            self._socket.check()
            while not self._unsent.empty():
                wire.send(*self._unsent.get())
        self._socket.close()
        self._selector.close()

    def receive(self) -> tuple[FrameSocket, bytes]:
        """The next message and its sender."""
        return self.received.get(timeout=5.0)

    def awaits_end(self) -> FrameSocket:
        """The next connection that a node closes."""
        return self._ended.get(timeout=5.0)

    def send(self, peer: FrameSocket, message: object) -> None:
        self._unsent.put((peer, message))

    def close(self) -> None:
        self._over.set()
        self._thread.join(5.0)
