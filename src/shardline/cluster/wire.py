"""The sockets between a head and its nodes: encrypted, open only to holders of the join token, with bounded frames."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator

import msgspec
import zmq
import zmq.auth.thread
from zmq.utils.monitor import recv_monitor_message

from shardline.channel import MAX_FRAME_BYTES
from shardline.cluster.token import head_keys, node_keys

BEAT_SECONDS = 1.0
"""Seconds between two beats of a node or its head."""
SILENCE = 4.0
"""Seconds without any message after which a node or its head counts as lost."""
UNANSWERED = SILENCE + BEAT_SECONDS
"""Seconds after which a node whose answers do not come counts as lost, although other messages of it do."""

_DOMAIN = b"shardline"
_HANDSHAKE_MILLISECONDS = 2000
_CONNECT_MILLISECONDS = 1500
_REFUSAL_SECONDS = 1.0
"""A refusal comes at once. A handshake that ends later has had no answer."""
_REFUSALS = 3
"""One connection may end at once because the head process does."""
_MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + (1 << 20)
_ENCODER = msgspec.msgpack.Encoder()
_WRONG_KEYS = {
    (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400),
    (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)),
}
"""What a handshake with another token's keys ends with: the client's key is not allowed, or the head's is wrong."""
_NOTICE_SECONDS = 10.0
_log = logging.getLogger(__name__)


def encode(message: object) -> bytes:
    """The frame of a message."""
    return _ENCODER.encode(message)


class HeadSocket:
    """The head's listening socket. Without ZAP, libzmq would let in any client key; one key is allowed."""

    def __init__(self, token: str, address: str, port: int) -> None:
        """Listen.

        Raises:
            ValueError: the address or the port cannot be used.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._monitor: zmq.Socket[bytes] | None = None
        self._noticed = -_NOTICE_SECONDS
        self._authenticator.configure_curve_callback(_DOMAIN.decode(), _AllowedKey(node_keys(token).public))
        self.socket = _configured(self._context.socket(zmq.ROUTER))
        keys = head_keys(token)
        self.socket.curve_server = True
        self.socket.curve_secretkey, self.socket.curve_publickey = keys.secret, keys.public
        self.socket.router_mandatory = True
        try:
            self.socket.bind(f"tcp://{address}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(
                f"the head cannot listen on {address} port {port}: {error.strerror}; name an address of this host "
                "with --master-addr, or a free port with --master-port"
            ) from error

    def watch_connections(self) -> zmq.Socket[bytes]:
        """Notice from now on that connections end; what this returns is readable when `ended_connections` has news."""
        failures = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | failures)
        return self._monitor

    def receive(self) -> tuple[bytes, bytes, int]:
        """The next message: its sender's name, its body, and the number of the connection that it came over.

        Raises:
            zmq.Again: there is none.
            ValueError: it has more parts than nodes send.
        """
        identity, body = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        return identity.bytes, body.bytes, int(body.get(zmq.SRCFD))

    def ended_connections(self) -> Iterator[int]:
        """The numbers of connections that have ended. A number may be given to a new connection afterwards."""
        while self._monitor is not None and self._monitor.poll(0):
            message = recv_monitor_message(self._monitor)
            event, value = message["event"], int(message["value"])
            if event == zmq.EVENT_DISCONNECTED:
                yield value
            elif (event, value) in _WRONG_KEYS:
                self._note_wrong_key()

    def _note_wrong_key(self) -> None:
        """Log that a node was refused; a node tries several times, so not each time."""
        if (now := time.monotonic()) - self._noticed >= _NOTICE_SECONDS:
            self._noticed = now
            _log.error("a node is refused: its join token is not the head's; copy the head's token to the node")

    def send(self, identity: bytes, message: object) -> None:
        """Send a message to a node. One that has gone is ignored: the end of its connection will be noticed."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)

    def close(self) -> None:
        """Stop listening. Messages that were sent have half a second to leave."""
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close()
        self.socket.close(linger=500)
        self._authenticator.stop()
        self._context.term()


class NodeSocket:
    """A node's connection to its head."""

    def __init__(self, token: str, address: str, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = _configured(self._context.socket(zmq.DEALER))
        keys, self._refusals, self._greeted = node_keys(token), 0, False
        self._connected: float | None = None
        self.socket.curve_serverkey = head_keys(token).public
        self.socket.curve_secretkey, self.socket.curve_publickey = keys.secret, keys.public
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = 100, 250
        # The kernel's own next try comes ever later, so a node would join long after a cut has healed.
        self.socket.connect_timeout = _CONNECT_MILLISECONDS
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED
        failures = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        self.monitor = self.socket.get_monitor_socket(events | failures | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        """Readable when the connection has begun or ended."""
        self._is_lost = self._has_given_up = False
        self.socket.routing_id = secrets.token_bytes(16)
        self.socket.connect(f"tcp://{address}:{port}")

    def send(self, message: object) -> None:
        """Send a message to the head. Without any connection it is lost, as in a connection that ends."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(encode(message), zmq.NOBLOCK)

    def was_refused(self) -> bool:
        """Whether a program listens at the head's address, but ends the handshake again and again, or is no head.

        For nodes that have not joined: connections that have ended before do not count in `is_lost`.
        """
        self._read_events()
        self._is_lost = False
        return self._has_given_up or self._refusals >= _REFUSALS

    def is_lost(self) -> bool:
        """Whether a connection has ended after its handshake: frames may be lost, so it is good for nothing more."""
        self._read_events()
        return self._is_lost

    def _read_events(self) -> None:
        while self.monitor.poll(0):
            event, now = recv_monitor_message(self.monitor), time.monotonic()
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._greeted, self._refusals = True, 0
            elif event["event"] == zmq.EVENT_CONNECTED:
                self._connected = now
            elif self._connected is not None:  # several events may tell of one end
                # Of an answer in another protocol there is no other event, and libzmq does not connect again.
                self._has_given_up |= not self._greeted and event["event"] == zmq.EVENT_DISCONNECTED
                is_refusal = not self._greeted and now - self._connected <= _REFUSAL_SECONDS
                self._refusals = self._refusals + 1 if is_refusal else 0
                self._is_lost |= self._greeted
                self._connected = None

    def close(self) -> None:
        """End the connection. Messages that were sent have half a second to leave."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close(linger=500)
        self._context.term()


class _AllowedKey:
    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this key may connect."""
        return key == self._key


def _configured(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    socket.sndhwm = socket.rcvhwm = 0  # a router drops messages beyond its limit
    socket.linger = 0
    socket.maxmsgsize = _MAX_MESSAGE_BYTES
    socket.handshake_ivl = _HANDSHAKE_MILLISECONDS
    socket.zap_domain = _DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.tcp_keepalive = 1
    return socket
