"""What is special about groups and links over sockets: long messages, peers that end, aborts, time-outs."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest
import torch

from shardline import _cpu
from shardline.runtime.parallel.exchange import CollectiveAborted, Group, SocketGroup, SocketLink
from tests.runtime.parallel.carriers import SOCKETS, run_ranks, socket_groups

PATIENCE_S = 30.0


def test_large_messages_cross_each_other() -> None:
    """Far more than the buffers of the sockets, from both sides at once, with rows that are scattered."""

    def body(group: Group) -> bool:
        assert isinstance(group, SocketGroup)
        local = torch.full((64, 1 << 15), float(group.rank + 1))
        out = torch.empty(64, 2 << 15)
        group.all_gather_columns(local, [1 << 15, 1 << 15], out, PATIENCE_S)
        group.all_reduce_sum(local, PATIENCE_S)
        return bool((out[:, : 1 << 15] == 1).all() and (out[:, 1 << 15 :] == 2).all() and (local == 3).all())

    assert run_ranks(2, body, data_bytes=SOCKETS) == [True, True]


def test_a_peer_that_ends_is_named_at_once() -> None:
    groups = socket_groups(3)
    errors: dict[int, Exception] = {}

    def wait(rank: int) -> None:
        try:
            groups[rank].barrier(PATIENCE_S)
        except ConnectionError as error:
            errors[rank] = error

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    began = time.monotonic()
    groups[1] = None  # type: ignore[call-overload]  # its sockets close, as those of a process that was killed
    for thread in threads:
        thread.join()
    assert time.monotonic() - began < 1.0
    # The first that notices closes its sockets too, so the last may name it.
    assert any(str(error) == "rank 1 at home closed its connection" for error in errors.values())
    assert set(errors) == {0, 2}


def test_a_timeout_names_the_missing_ranks_and_ends_the_group() -> None:
    groups = socket_groups(3)
    results: list[Exception | None] = [None, None]

    def meet(rank: int) -> None:
        try:
            groups[rank].barrier(0.2)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late = [error for error in results if isinstance(error, TimeoutError)]
    assert late, results
    assert late[0].missing_ranks == [2]  # type: ignore[attr-defined]
    assert "not arrived: rank 2 at home" in str(late[0])
    with pytest.raises(ConnectionError, match=r"rank [01] at home closed its connection"):
        groups[2].barrier(PATIENCE_S)
    with pytest.raises(ConnectionError, match="an earlier exchange of this group has failed"):
        groups[0].barrier(PATIENCE_S)


def test_an_abort_ends_the_exchange_on_all_ranks() -> None:
    def body(group: Group) -> None:
        assert isinstance(group, SocketGroup)
        if group.rank == 1:
            threading.Timer(0.1, group.abort).start()
        if group.rank != 2:
            group.barrier(PATIENCE_S)
        else:
            time.sleep(0.3)

    began = time.monotonic()
    waited, aborted, _ = run_ranks(3, body, data_bytes=SOCKETS)
    assert time.monotonic() - began < 2.0
    assert isinstance(waited, ConnectionError)
    assert isinstance(aborted, CollectiveAborted)
    assert "aborted by rank 1" in str(aborted)


def test_a_frame_of_another_exchange_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    group = SocketGroup([-1, ours.detach()], 0, ["", "rank 1"])
    with theirs:
        theirs.sendall((7).to_bytes(8, "little") + (12).to_bytes(8, "little") + b"abc")
        with pytest.raises(RuntimeError, match="sent exchange 7 with 12 bytes where exchange 1 with 0 bytes"):
            group.barrier(PATIENCE_S)


def test_exchanges_are_counted_and_replayed() -> None:
    """A recorded program gathers again, and the progress line counts each time."""
    fds = [sock.detach() for sock in socket.socketpair()]
    inputs = [torch.full((1, 2), 1.0), torch.full((1, 2), 2.0)]
    counters = [np.zeros(2, dtype=np.int64) for _ in range(2)]
    outputs = []

    def run(rank: int) -> None:
        group = SocketGroup([fds[rank]] * 2, rank, ["rank 0", "rank 1"], progress=counters[rank])
        program, out = _cpu.Program(), torch.empty(1, 4)
        program.begin()
        group.all_gather_columns(inputs[rank], [2, 2], out, PATIENCE_S)
        program.set_output(out)
        program.end()
        inputs[rank] += 10
        program.replay()
        outputs.append(out.tolist())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == [[[11.0, 11.0, 12.0, 12.0]]] * 2
    assert [list(line) for line in counters] == [[2, 0]] * 2


def test_a_link_carries_messages_in_order() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = SocketLink(ours.detach(), "rank 2"), SocketLink(theirs.detach(), "rank 0")
    messages = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (1, 5000, 3 << 20, 0, 7)]

    def send() -> None:
        for message in messages:
            sender.send(message, PATIENCE_S)

    thread = threading.Thread(target=send)
    thread.start()
    for message in messages:
        out = torch.empty_like(message)
        receiver.recv_into(out, PATIENCE_S)
        assert torch.equal(out, message)
    thread.join()
    sender.send(b"abc", PATIENCE_S)
    with pytest.raises(RuntimeError, match="rank 0 sent exchange 6 with 3 bytes where exchange 6 with 4 bytes"):
        receiver.recv_into(bytearray(4), PATIENCE_S)
    with pytest.raises(CollectiveAborted):
        receiver.recv_into(bytearray(3), PATIENCE_S)


def test_a_link_waits_no_longer_than_it_may() -> None:
    ours, theirs = socket.socketpair()
    receiver = SocketLink(ours.detach(), "rank 0")
    with theirs, pytest.raises(TimeoutError, match="rank 0 sent no message in time"):
        receiver.recv_into(bytearray(4), 0.05)
    with pytest.raises(CollectiveAborted):
        receiver.recv_into(bytearray(4), 0.05)
