"""The join token, and the connections between a head and its nodes: only holders of the token get in."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from shardline import env
from shardline.channel import FRAME_LENGTH, MAX_FRAME_BYTES
from shardline.config.cluster import ClusterConfig
from shardline.handshake import Connection, HandshakeRefused, Listener, connect, run_callbacks
from shardline.seal import SEAL_BYTES, Seal

BEAT_SECONDS = 1.0
"""Seconds between two beats of a node or its head."""
SILENCE = 4.0
"""Seconds without any message after which a node or its head counts as lost."""
UNANSWERED = SILENCE + BEAT_SECONDS
"""Seconds after which a node whose answers do not come counts as lost, although other messages of it do."""

READ_BYTES = 1 << 20
"""Bytes that are read at a time, so that others get their turn."""
_PURPOSE = "node"
_MAX_BYTES = MAX_FRAME_BYTES + 2 * READ_BYTES
"""A message carries what was read from a stream at a time."""
_CONNECT_SECONDS = 1.5
_RETRY_SECONDS = 0.1
_REFUSALS = 3
"""One connection may end at once because the head process does."""
_NOTICE_SECONDS = 10.0
_LINGER_SECONDS = 0.5
_ENCODER = msgspec.msgpack.Encoder()
_LEAST_CHARS = 22
"""Of a token: 128 bits in base64."""
_log = logging.getLogger(__name__)


class FrameSocket:
    """One end of a connection in an event loop: nothing blocks, and what cannot be sent yet waits.

    One thread calls all methods and the callbacks: of `run_callbacks`.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        on_frames: Callable[[list[bytes]], None],
        on_end: Callable[[], None],
        *,
        seal: Seal | None = None,
        max_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """Read from now on. `on_frames` gets the bodies of whole frames, each of at most `max_bytes`.

        `on_end` is called once the other end has closed the connection, after its last frames; this end is closed then.
        """
        sock.setblocking(False)
        self._socket = sock
        self._selector = selector
        self._on_frames, self._on_end = on_frames, on_end
        self._seal = seal
        self._max_bytes = max_bytes + (SEAL_BYTES if seal else 0)
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._closing = False
        self.is_closed = False
        self._events = selectors.EVENT_READ
        selector.register(sock, self._events, self._handle)

    def send(self, body: bytes) -> None:
        """Send a frame. A connection that has ended, or that is being closed, drops it."""
        if self._closing:
            return
        if self._seal is not None:
            body = self._seal.seal(body)
        self._unsent.append(memoryview(FRAME_LENGTH.pack(len(body)) + body))
        if len(self._unsent) == 1:  # else the selector waits until there is room
            self._flush()

    def close(self) -> None:
        """Close this end once everything has left that was sent. What comes until then is dropped."""
        self._closing = True
        if not self._unsent:
            self.drop()

    def drop(self) -> None:
        """Close this end at once."""
        if not self.is_closed:
            self._closing = self.is_closed = True
            self._selector.unregister(self._socket)
            self._socket.close()

    def finish(self, deadline: float) -> None:
        """Close this end of a connection between hosts. What was sent has time until `deadline` to arrive.

        The end waits for the other one: the kernel forgets what it has not sent yet if data comes after a close.
        """
        if self.is_closed:
            return
        with contextlib.suppress(OSError):
            while self._unsent:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                self._socket.sendall(self._unsent.popleft())
            self._socket.shutdown(socket.SHUT_WR)
            while time.monotonic() < deadline and self._socket.recv(READ_BYTES):
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        self.drop()

    def _handle(self, events: int) -> None:
        # An event of the same turn may have closed this end.
        if events & selectors.EVENT_WRITE and not self.is_closed:
            self._flush()
        if events & selectors.EVENT_READ and not self.is_closed:
            self._read()

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        frames: list[bytes] = []
        try:
            while (frame := self._take_frame()) is not None:
                frames.append(frame)
        except EOFError:
            data = b""
        if frames and not self._closing:
            self._on_frames(frames)
        if not data and not self.is_closed:
            was_closing = self._closing
            self.drop()
            if not was_closing:
                self._on_end()

    def _take_frame(self) -> bytes | None:
        """The body of the next frame that is whole.

        Raises:
            EOFError: it is too large, or not what the other end has sent.
        """
        if len(self._received) < FRAME_LENGTH.size:
            return None
        (size,) = FRAME_LENGTH.unpack_from(self._received)
        if size > self._max_bytes:
            raise EOFError(f"the peer announced a message of {size} bytes")
        if len(self._received) < (end := FRAME_LENGTH.size + size):
            return None
        body = bytes(memoryview(self._received)[FRAME_LENGTH.size : end])
        del self._received[:end]
        return body if self._seal is None else self._seal.open(body)

    def _flush(self) -> None:
        try:
            while self._unsent:
                rest = self._unsent[0][self._socket.send(self._unsent[0]) :]
                if rest:
                    self._unsent[0] = rest
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # the other end has gone; reading will say so
            self._unsent.clear()
        if self._closing and not self._unsent:
            self.drop()
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self._socket, events, self._handle)


def own_token_file() -> Path:
    """Where the head keeps its token unless the user names a file."""
    return Path.home() / ".config" / "shardline" / "join-token"


def find_token(config: ClusterConfig) -> str:
    """The token: of --join-token-file, else of SHARDLINE_JOIN_TOKEN, else of the own file, which a head creates.

    Raises:
        ValueError: there is none, or it is too short.
    """
    if config.join_token_file is not None:
        return _check_token(_read_file(Path(config.join_token_file)), config.join_token_file)
    if (token := env.join_token()) is not None:
        return _check_token(token, "SHARDLINE_JOIN_TOKEN")
    file = own_token_file()
    if not file.exists():
        if config.is_headless:
            raise ValueError(
                f"this node has no join token; copy {file} of the head to the same place here, or set "
                "SHARDLINE_JOIN_TOKEN or --join-token-file"
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as created:
            created.write(secrets.token_urlsafe(32) + "\n")
        _log.warning(
            "a new join token is in %s; copy it to each other node: ssh NODE mkdir -p .config/shardline && "
            "scp -p %s NODE:.config/shardline/",
            file,
            file,
        )
    return _check_token(_read_file(file), str(file))


def _read_file(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the join token {file} cannot be read: {error}") from error


def _check_token(token: str, place: str) -> str:
    if len(token) < _LEAST_CHARS:
        raise ValueError(
            f"the join token of {place} has {len(token)} characters and needs {_LEAST_CHARS}; "
            "`openssl rand -base64 24` makes one"
        )
    return token


def send(peer: FrameSocket, message: object) -> None:
    """Send a message. One to a peer that has gone is dropped: the end of its connection will be noticed."""
    peer.send(_ENCODER.encode(message))


class HeadSocket:
    """The head's listening socket, and its connections with nodes."""

    def __init__(
        self,
        token: str,
        address: str,
        port: int,
        selector: selectors.BaseSelector,
        on_message: Callable[[FrameSocket, bytes], None],
        on_end: Callable[[FrameSocket], None],
    ) -> None:
        """Listen. `on_message` gets the messages of a peer that knows the token; `on_end`: its connection has ended.

        Raises:
            ValueError: the address or the port cannot be used.
        """
        self._selector = selector
        self._on_message, self._on_end = on_message, on_end
        self._peers: set[FrameSocket] = set()
        self._num_refused, self._noticed = 0, -_NOTICE_SECONDS
        try:
            self._listener = Listener(selector, address, port, _secret(token), {_PURPOSE}.__contains__, self._take)
        except OSError as error:
            raise ValueError(
                f"the head cannot listen on {address} port {port}: {error.strerror}; name an address of this host "
                "with --master-addr, or a free port with --master-port"
            ) from error

    def check(self) -> None:
        """Drop silent strangers, and name a node with another token. Call this every second."""
        self._listener.drop_silent()
        # A node tries several times, so not each refusal is named.
        if self._listener.num_refused > self._num_refused and time.monotonic() - self._noticed >= _NOTICE_SECONDS:
            self._noticed = time.monotonic()
            _log.error("a node is refused: its join token is not the head's; copy the head's token to the node")
        self._num_refused = self._listener.num_refused

    def close(self) -> None:
        """Stop listening. Messages that were sent have half a second to leave."""
        self._listener.close()
        deadline = time.monotonic() + _LINGER_SECONDS
        for peer in self._peers:
            peer.finish(deadline)

    def _take(self, _purpose: str, connection: Connection) -> None:
        def on_frames(bodies: list[bytes]) -> None:
            for body in bodies:
                self._on_message(peer, body)

        def on_end() -> None:
            self._peers.discard(peer)
            self._on_end(peer)

        sock, seal = connection
        peer = FrameSocket(sock, self._selector, on_frames, on_end, seal=seal, max_bytes=_MAX_BYTES)
        self._peers.add(peer)


class NodeSocket:
    """A node's connection to its head."""

    def __init__(self, token: str, address: str, port: int, selector: selectors.BaseSelector | None = None) -> None:
        """Connect once. `selector`: of the caller's event loop, if it has one.

        Raises:
            HandshakeRefused: the token is another one, or another program listens there.
            OSError: nobody answers.
        """
        sock, seal = connect(address, port, _secret(token), _PURPOSE, _CONNECT_SECONDS)
        self.received: deque[bytes] = deque()
        """Messages of the head that nobody has read yet."""
        self._is_closed = False
        self._selector = selector or selectors.DefaultSelector()
        self._peer = FrameSocket(
            sock, self._selector, self.received.extend, self._note_end, seal=seal, max_bytes=_MAX_BYTES
        )

    @property
    def has_ended(self) -> bool:
        """Whether the head has closed the connection, and all that it has sent was read."""
        return self._is_closed and not self.received

    def send(self, message: object) -> None:
        send(self._peer, message)

    def receive(self, timeout: float) -> bytes | None:
        """The next message; None: none came within `timeout` seconds, or the connection has ended."""
        deadline = time.monotonic() + timeout
        while not self.received and not self._is_closed and (left := deadline - time.monotonic()) > 0:
            run_callbacks(self._selector, left)
        return self.received.popleft() if self.received else None

    def close(self) -> None:
        """End the connection. Messages that were sent have half a second to leave."""
        self._peer.finish(time.monotonic() + _LINGER_SECONDS)

    def _note_end(self) -> None:
        self._is_closed = True


def connect_to_head(
    token: str,
    address: str,
    port: int,
    may_wait: Callable[[], bool],
    selector: selectors.BaseSelector | None = None,
) -> NodeSocket | None:
    """Connect to the head, again and again while `may_wait()` says so; None: nobody answers.

    Raises:
        HandshakeRefused: the head's token is another one, or another program listens there.
    """
    refusals = 0
    while may_wait():
        try:
            return NodeSocket(token, address, port, selector)
        except HandshakeRefused:
            refusals += 1
            if refusals == _REFUSALS:
                raise
        except OSError:
            refusals = 0
        time.sleep(_RETRY_SECONDS)
    return None


def _secret(token: str) -> bytes:
    """What a head and its nodes prove to know; it does not tell the token."""
    return hmac.digest(token.encode(), b"shardline nodes", "sha256")
