"""One TCP connection between two hosts, on which latency and bandwidth are measured as ranks would see them."""

from __future__ import annotations

import contextlib
import hmac
import socket
import statistics
import struct
import threading
import time

from shardline.messages.node import Connect, Listen, Listening, Measured

ACCEPT_SECONDS = 4.0
_CONNECT_SECONDS = 2.0
_PING_SECONDS = 0.1
_CHUNK = bytes(1 << 18)
_COUNT = struct.Struct("!Q")


def answer(command: Listen | Connect, address: str) -> Listening | Measured:
    """Do what the head asks for, on the host with this address. `Connect` takes about `command.seconds` and 0.1 s."""
    try:
        if isinstance(command, Listen):
            return Listening(_listen(address, command.key))
        return _connect(command)
    except OSError as error:
        what = f"{command.address} port {command.port}" if isinstance(command, Connect) else f"listening on {address}"
        return Measured(error=f"{what}: {error.strerror or error}")


def _listen(address: str, key: bytes) -> int:
    """Accept one connection in a thread; returns the port."""
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.settimeout(ACCEPT_SECONDS)
    threading.Thread(target=_serve, args=(listener, key), name="link-listen", daemon=True).start()
    return int(listener.getsockname()[1])


def _serve(listener: socket.socket, key: bytes) -> None:
    """Serve the first connection that begins with `key`."""
    with listener, contextlib.suppress(OSError):
        is_served = False
        while not is_served:
            client, _ = listener.accept()
            with client, contextlib.suppress(OSError):
                client.settimeout(ACCEPT_SECONDS)
                is_served = hmac.compare_digest(_receive(client, len(key)), key)
                if is_served:
                    _echo_and_count(client)


def _echo_and_count(client: socket.socket) -> None:
    """Echo bytes until one is "b"; then count bytes to the end, and answer with their number."""
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while (byte := client.recv(1)) == b"p":
        client.sendall(byte)
    total, buffer = 0, bytearray(len(_CHUNK))
    while count := client.recv_into(buffer):
        total += count
    client.sendall(_COUNT.pack(total))


def _connect(command: Connect) -> Measured:
    """Ping, then send for some time.

    Raises:
        OSError: the connection cannot be made, or it breaks.
    """
    with socket.create_connection((command.address, command.port), timeout=_CONNECT_SECONDS) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(ACCEPT_SECONDS)
        sock.sendall(command.key)
        trips: list[float] = []
        end = time.monotonic() + _PING_SECONDS
        while not trips or (len(trips) < 200 and time.monotonic() < end):
            begin = time.perf_counter()
            sock.sendall(b"p")
            if not sock.recv(1):
                raise OSError("the other host has closed the connection")
            trips.append(time.perf_counter() - begin)
        sock.sendall(b"b")
        begin = time.perf_counter()
        while time.perf_counter() < begin + command.seconds:
            sock.sendall(_CHUNK)
        sock.shutdown(socket.SHUT_WR)
        (total,) = _COUNT.unpack(_receive(sock, _COUNT.size))
        return Measured(statistics.median(trips), total / (time.perf_counter() - begin))


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := sock.recv(size - len(data))):
        data += part
    if len(data) < size:
        raise OSError("the other host has closed the connection")
    return data
