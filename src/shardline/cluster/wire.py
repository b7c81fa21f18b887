"""The sockets between a head and its nodes: encrypted, open only to holders of the join token, with bounded frames."""

from __future__ import annotations

import contextlib
import secrets
import time

import msgspec
import zmq
import zmq.auth.thread

from shardline.channel import MAX_FRAME_BYTES
from shardline.cluster.token import head_keys, node_keys

BEAT_SECONDS = 1.0
"""Seconds between two beats of a node or its head."""
SILENCE = 4.0
"""Seconds without any message after which a node or its head counts as lost."""

_DOMAIN = b"shardline"
_HANDSHAKE_MILLISECONDS = 2000
_REFUSAL_SECONDS = 1.0
"""A refusal comes at once. A handshake that ends later has had no answer."""
_MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + (1 << 20)
_ENCODER = msgspec.msgpack.Encoder()


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

    def send(self, identity: bytes, message: object) -> None:
        """Send a message to a node. One that has gone is ignored: its silence will be noticed."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)

    def close(self) -> None:
        """Stop listening. Messages that were sent have half a second to leave."""
        self.socket.close(linger=500)
        self._authenticator.stop()
        self._context.term()


class NodeSocket:
    """A node's connection to its head."""

    def __init__(self, token: str, address: str, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = _configured(self._context.socket(zmq.DEALER))
        keys, self._refusals, self._greeted, self._connected = node_keys(token), 0, False, 0.0
        self.socket.curve_serverkey = head_keys(token).public
        self.socket.curve_secretkey, self.socket.curve_publickey = keys.secret, keys.public
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = 100, 250
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECTED
        failures = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        self._monitor = self.socket.get_monitor_socket(events | failures | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        self.socket.routing_id = secrets.token_bytes(16)
        self.socket.connect(f"tcp://{address}:{port}")

    def was_refused(self) -> bool:
        """Whether a program listens at the head's address, but ends the handshake again and again."""
        from zmq.utils.monitor import recv_monitor_message

        while self._monitor.poll(0):
            event, now = recv_monitor_message(self._monitor), time.monotonic()
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._greeted, self._refusals = True, 0
            elif event["event"] == zmq.EVENT_CONNECTED:
                self._connected = now
            elif now - self._connected > _REFUSAL_SECONDS:  # a program that is stopped does not refuse
                self._refusals = 0
            elif not self._greeted:
                self._refusals += 1
        return self._refusals >= 2

    def close(self) -> None:
        """End the connection. Messages that were sent have half a second to leave."""
        self.socket.disable_monitor()
        self._monitor.close()
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
