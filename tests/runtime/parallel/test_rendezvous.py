"""Ranks of several hosts meet over TCP; strangers and truncated hellos are turned away."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardline import handshake
from shardline.runtime.parallel.rendezvous import LocalStore, Meeting, Store, connect_ranks

NONCE = secrets.token_bytes(32)
TENSOR: dict[str, tuple[int, ...]] = {"tensor": (0, 1, 2)}


def meeting(store: Store, timeout: float = 20.0, nonce: bytes = NONCE) -> Meeting:
    return Meeting(store, "127.0.0.1", nonce, timeout)


def test_every_two_ranks_get_a_connection_for_each_group() -> None:
    store = LocalStore()
    groups = {
        0: {**TENSOR, "link": (0, 2)},
        1: TENSOR,
        2: {**TENSOR, "link": (0, 2)},
    }
    with ThreadPoolExecutor(3) as pool:
        met = list(pool.map(lambda rank: connect_ranks(meeting(store), rank, groups[rank]), range(3)))
    for rank, joined in enumerate(met):
        for name, connections in joined.items():
            assert set(connections) == set(groups[rank][name]) - {rank}
            for peer, connection in connections.items():
                connection.sendall(f"{name} from {rank} to {peer}".ljust(40).encode())
    for rank, joined in enumerate(met):
        for name, connections in joined.items():
            for peer, connection in connections.items():
                with connection:
                    received = connection.recv(40, socket.MSG_WAITALL)
                assert received.decode().rstrip() == f"{name} from {peer} to {rank}"
    # Nobody listens any more.
    for rank in (0, 1):
        host, _, port = store.get(f"address/{rank}", 0.0).decode().rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=1.0)


def test_missing_ranks_are_named() -> None:
    store = LocalStore()

    def meet(rank: int) -> str:
        with pytest.raises(TimeoutError) as error:
            connect_ranks(meeting(store, 0.3), rank, {"tensor": (0, 1, 2, 3)})
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        first, last = pool.map(meet, (0, 2))
    assert first == "rank 0 waited 0.3 s for connections; missing: rank 1, rank 3"
    assert "missing: rank 1 (it has not published an address), rank 3" in last


def test_a_rank_of_another_launch_is_refused() -> None:
    store = LocalStore()

    def meet(rank: int) -> str:
        nonce, timeout = (NONCE, 0.4) if rank else (b"x" * 32, 0.8)
        with pytest.raises(TimeoutError) as error:
            connect_ranks(meeting(store, timeout, nonce), rank, {"tensor": (0, 1)})
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(meet, (0, 1))
    assert "missing: rank 1" in first
    assert "refused the connection: it closed the connection" in second


class Meet:
    """Ranks 0 and 1 meet; in between, a test can do what it wants to rank 0's listener."""

    def __init__(self, timeout: float = 20.0) -> None:
        self._store = LocalStore()
        self._pool = ThreadPoolExecutor(2)
        self._first = self._pool.submit(connect_ranks, meeting(self._store, timeout), 0, {"tensor": (0, 1)})
        host, _, port = self._store.get("address/0", 5.0).decode().rpartition(":")
        self.address = host, int(port)

    def finish(self) -> None:
        """The ranks meet in spite of everything."""
        second = self._pool.submit(connect_ranks, meeting(self._store), 1, {"tensor": (0, 1)})
        ends = [done.result(20.0)["tensor"][peer] for done, peer in ((self._first, 1), (second, 0))]
        ends[0].sendall(b"hello")
        assert ends[1].recv(5, socket.MSG_WAITALL) == b"hello"
        for end in ends:
            end.close()
        self._pool.shutdown()


def test_silent_and_truncated_hellos_are_dropped_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_SECONDS", 0.2)
    meet = Meet()
    strangers = [socket.create_connection(meet.address, timeout=5.0) for _ in range(2)]
    strangers[1].sendall(secrets.token_bytes(100))
    began = time.monotonic()
    for stranger in strangers:
        assert len(stranger.recv(48, socket.MSG_WAITALL)) == 48
        assert stranger.recv(1) == b""
        stranger.close()
    assert 0.1 < time.monotonic() - began < 2.0
    meet.finish()


def test_many_silent_connections_do_not_keep_a_rank_out() -> None:
    meet = Meet()
    strangers = [socket.create_connection(meet.address, timeout=5.0) for _ in range(400)]
    began = time.monotonic()
    meet.finish()
    assert time.monotonic() - began < 1.5
    for stranger in strangers:
        stranger.close()


def test_a_proof_is_good_for_one_connection_only() -> None:
    """A stranger that heard the proof of a rank cannot use it on a connection of its own."""
    meet = Meet()
    purpose, key = b"tensor: 1 to 0".ljust(96, b"\0"), secrets.token_bytes(32)
    greeting = handshake._GREETING.pack(handshake._MAGIC, purpose, key)
    with socket.create_connection(meet.address, timeout=5.0) as first:
        theirs = first.recv(48, socket.MSG_WAITALL)[16:]
    proof = handshake._Handshake(NONCE, purpose, key, theirs).proof(b"connect")
    with socket.create_connection(meet.address, timeout=5.0) as second:
        assert second.recv(48, socket.MSG_WAITALL)[16:] != theirs
        second.sendall(greeting + proof)
        assert second.recv(1) == b""
    meet.finish()


def test_random_frames_are_refused_and_take_no_memory() -> None:
    """Most of them have the right length and purpose. `make fuzz` sends many more."""
    frames = 1000
    rng = random.Random(5)
    meet = Meet(timeout=20.0 + frames / 100)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()

    def attack(count: int) -> None:
        for number in range(count):
            source = (f"127.0.1.{1 + number % 250}", 0)  # one address has too few ports
            frame = rng.randbytes(rng.choice((0, 1, 31, 175, 176, 176, 176, 300)))
            if len(frame) >= 176:
                frame = handshake._MAGIC + b"tensor: 1 to 0".ljust(96, b"\0") + frame[112:]
            with contextlib.suppress(OSError), socket.create_connection(meet.address, 5.0, source) as stranger:
                stranger.sendall(frame)

    attackers = [threading.Thread(target=attack, args=(frames // 2,)) for _ in range(2)]
    for attacker in attackers:
        attacker.start()
    for attacker in attackers:
        attacker.join()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 1 << 20
    meet.finish()
