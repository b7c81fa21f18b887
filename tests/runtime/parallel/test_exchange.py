"""Groups and mailboxes between threads of this process, and between real processes; sockets give the same results."""

from __future__ import annotations

import _thread
import multiprocessing
import signal
import threading
import time
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch
from torch import Tensor

from shardline.kernels.tensors import QuantizedRows
from shardline.runtime.parallel.exchange import CollectiveAborted, Group, Mailbox, SharedGroup
from shardline.weights.rows import quantize_rows, quantize_rows_reference
from tests.runtime.ops.helpers import KERNELS, assert_same_bits
from tests.runtime.parallel.carriers import SOCKETS, run_ranks, zeros

PATIENCE_S = 30.0

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])  # torch is imported once, and not by each process


@pytest.mark.parametrize("data_bytes", [1 << 14, SOCKETS])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_barrier_keeps_ranks_in_step(size, data_bytes):
    counts = [0] * size

    def body(group: Group) -> list[int]:
        lowest = []
        for _ in range(60):
            counts[group.rank] += 1
            group.barrier(PATIENCE_S)
            lowest.append(min(counts))
            group.barrier(PATIENCE_S)
        return lowest

    for lowest in run_ranks(size, body, data_bytes=data_bytes):
        assert lowest == list(range(1, 61))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 300])
@pytest.mark.parametrize("data_bytes", [1 << 14, SOCKETS])
def test_gathered_rows_are_quantized_as_a_whole(size, num_rows, dtype, data_bytes):
    """In several goes, where the group's memory holds fewer rows."""
    widths = [70, 0, 33][:size]
    x = torch.randn(num_rows, sum(widths), generator=torch.Generator().manual_seed(size)).to(dtype)
    x[::7] *= 100.0
    x[3:4, -1] = torch.inf
    expected = quantize_rows_reference(x) if num_rows else quantize_rows(KERNELS, x)

    def body(group: Group) -> QuantizedRows:
        local = torch.split(x, widths, dim=1)[group.rank].contiguous()
        rows = KERNELS.quantized_empty(num_rows, sum(widths), dtype)
        group.all_gather_quantized(local, widths, rows.values.fill_(9), rows.scales, rows.sums.fill_(9), PATIENCE_S)
        return rows._replace(values=rows.values.clone(), scales=rows.scales.clone(), sums=rows.sums.clone())

    for rows in run_ranks(size, body, data_bytes=data_bytes):
        assert torch.equal(rows.values, expected.values)
        assert torch.equal(rows.sums, expected.sums)
        assert_same_bits(torch.nan_to_num(rows.scales, nan=-1.0), torch.nan_to_num(expected.scales, nan=-1.0))


def test_a_row_that_the_memory_cannot_hold_is_refused():
    def body(group: Group) -> None:
        local = torch.ones(1, 5000)
        rows = KERNELS.quantized_empty(1, 10000, local.dtype)
        group.all_gather_quantized(local, [5000, 5000], rows.values, rows.scales, rows.sums, PATIENCE_S)

    for error in run_ranks(2, body):
        assert isinstance(error, ValueError)
        assert "no room for a row of 20000 bytes" in str(error)


def room(data_bytes: int, size: int) -> int:
    """At least the smallest memory that a group accepts."""
    return data_bytes if data_bytes == SOCKETS else max(data_bytes, 2 * size * 64)


def collectives(group: Group) -> list[Tensor]:
    """A few of each, longer and shorter than the data area; every result is a function of the ranks' inputs."""
    results = []
    rng = torch.Generator().manual_seed(group.rank)
    for step, (m, dtype) in enumerate(
        [(1, torch.bfloat16), (7, torch.float32), (300, torch.bfloat16), (0, torch.float32)]
    ):
        widths = [(5 * rank + step) % 13 for rank in range(group.size)]
        local = torch.randn(m, widths[group.rank], generator=rng).to(dtype)
        out = torch.empty(m, sum(widths), dtype=dtype)
        group.all_gather_columns(local, widths, out, PATIENCE_S)
        results += [local, out]
        counts = [(3 * rank + m) % 7 for rank in range(group.size)]
        local = torch.randn(counts[group.rank], 33, generator=rng).to(dtype)
        out = torch.empty(sum(counts), 33, dtype=dtype)
        group.all_gather_rows(local, counts, out, PATIENCE_S)
        results += [local, out]
        x = torch.randn(m, 97, generator=rng).to(dtype)
        results.append(x.clone())
        group.all_reduce_sum(x, PATIENCE_S)
        results.append(x)
        group.barrier(PATIENCE_S)
    return results


def check_collectives(per_rank: list[list[Tensor]]) -> None:
    for results in zip(*[iter(zip(*per_rank, strict=True))] * 6, strict=True):
        column_inputs, columns, row_inputs, rows, terms, sums = results
        total = terms[0].float()
        for term in terms[1:]:
            total = total + term.float()
        for rank in range(len(per_rank)):
            assert_same_bits(columns[rank], torch.cat(column_inputs, 1))
            assert_same_bits(rows[rank], torch.cat(row_inputs, 0))
            assert_same_bits(sums[rank], total.to(terms[0].dtype))


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("data_bytes", [0, 1 << 10, 1 << 18, SOCKETS])
def test_collectives_between_threads(size, data_bytes):
    check_collectives(run_ranks(size, collectives, data_bytes=room(data_bytes, size)))


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("data_bytes", [0, 1 << 10, 1 << 18, SOCKETS])
def test_all_to_all_between_threads(size, data_bytes):
    """Rows say where they come from and go to; some ranks send nothing, in the end all of them."""
    tables = [
        torch.tensor([[(3 * i + 5 * j + m) % m for j in range(size)] for i in range(size)]) for m in (7, 2, 60, 1)
    ]

    def rows(sender: int, receiver: int, count: int) -> Tensor:
        return torch.arange(count * 33).view(count, 33).to(torch.float32) + 1e4 * sender + 1e5 * receiver

    def body(group: Group) -> None:
        for counts in tables:
            local = torch.cat([rows(group.rank, to, int(counts[group.rank, to])) for to in range(size)])
            out = torch.full((int(counts[:, group.rank].sum()) + 2, 33), -1.0)
            group.all_to_all_rows(local, counts, out, PATIENCE_S)
            expected = torch.cat([rows(sender, group.rank, int(counts[sender, group.rank])) for sender in range(size)])
            assert_same_bits(out[:-2], expected)
            assert (out[-2:] == -1).all()

    assert run_ranks(size, body, data_bytes=room(data_bytes, size)) == [None] * size


@pytest.mark.parametrize("data_bytes", [1 << 14, SOCKETS])
def test_all_to_all_checks_its_counts(data_bytes):
    def body(group: Group) -> None:
        counts = torch.tensor([[0, 2], [1, 0]])
        group.all_to_all_rows(torch.zeros(2, 4), counts, torch.zeros(0, 4), PATIENCE_S)

    assert all("counts name" in str(error) for error in run_ranks(2, body, data_bytes=data_bytes))


def collectives_in_process(name: str, rank: int, size: int, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    memory = SharedMemory(name)
    assert memory.buf is not None
    group = SharedGroup(memory.buf, rank, size)
    tensors = collectives(group)
    # Bytes, so that no file descriptor of a tensor outlives its process.
    results.put((rank, [(t.float().numpy().tobytes(), tuple(t.shape), str(t.dtype)) for t in tensors]))
    del group
    memory.close()


def test_collectives_between_processes():
    size = 2
    memory = SharedMemory(create=True, size=SharedGroup.required_bytes(size, 1 << 12))
    try:
        queue = PROCESSES.Queue()
        ranks = [
            PROCESSES.Process(target=collectives_in_process, args=(memory.name, rank, size, queue))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        received = dict(queue.get(timeout=60) for _ in ranks)
        for process in ranks:
            process.join(60)
            assert process.exitcode == 0
    finally:
        memory.close()
        memory.unlink()
    per_rank = [
        [
            torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape).to(getattr(torch, dtype[6:]))
            if data
            else torch.empty(shape, dtype=getattr(torch, dtype[6:]))
            for data, shape, dtype in received[rank]
        ]
        for rank in range(size)
    ]
    check_collectives(per_rank)


def test_a_timeout_names_the_missing_ranks():
    def body(group: Group) -> None:
        group.barrier(PATIENCE_S)
        if group.rank not in (1, 3):
            group.barrier(0.2)

    errors = run_ranks(4, body)
    assert errors[1] is errors[3] is None
    for rank in (0, 2):
        assert isinstance(errors[rank], TimeoutError)
        assert errors[rank].missing_ranks == [1, 3]
        assert "ranks 1, 3" in str(errors[rank])


def test_abort_wakes_everyone():
    def body(group: Group) -> None:
        if group.rank == 2:
            time.sleep(0.1)
            group.abort()
        group.barrier(PATIENCE_S)

    start = time.monotonic()
    errors = run_ranks(3, body)
    assert time.monotonic() - start < PATIENCE_S / 2
    for error in errors:
        assert isinstance(error, CollectiveAborted)
        assert "by rank 2" in str(error)


def test_an_observer_looks_and_aborts():
    buffer = zeros(SharedGroup.required_bytes(2, 4096))
    group, observer = SharedGroup(buffer, 0, 2), SharedGroup(buffer, -1, 2)
    with pytest.raises(TimeoutError):
        group.barrier(0.05)
    assert observer.arrived() == [1, 0]
    assert not observer.aborted
    with pytest.raises(ValueError, match="observer"):
        observer.barrier()
    observer.abort()
    assert group.aborted
    with pytest.raises(CollectiveAborted, match="observer"):
        group.barrier()


@pytest.mark.parametrize("data_bytes", [1 << 14, SOCKETS])
def test_diverged_ranks_are_noticed(data_bytes):
    def body(group: Group) -> None:
        width = 3 + group.rank
        group.all_gather_columns(torch.ones(2, width), [width, width], torch.empty(2, 2 * width), PATIENCE_S)

    for error in run_ranks(2, body, data_bytes=data_bytes):
        assert isinstance(error, RuntimeError)
        assert "diverged" in str(error)


def test_wrong_shapes_and_buffers_are_refused():
    buffer = zeros(SharedGroup.required_bytes(2, 4096))
    group = SharedGroup(buffer, 0, 2)
    with pytest.raises(ValueError, match="local has shape"):
        group.all_gather_columns(torch.ones(2, 3), [4, 4], torch.empty(2, 8))
    with pytest.raises(ValueError, match="out has shape"):
        group.all_gather_rows(torch.ones(2, 3), [2, 2], torch.empty(4, 4))
    with pytest.raises(ValueError, match="one size per rank"):
        group.all_gather_rows(torch.ones(2, 3), [2], torch.empty(2, 3))
    with pytest.raises(ValueError, match="another size"):
        SharedGroup(buffer, 0, 3)
    with pytest.raises(ValueError, match="at least"):
        SharedGroup(zeros(100), 0, 1)
    with pytest.raises(ValueError, match="rank"):
        SharedGroup(buffer, 2, 2)
    with pytest.raises((BufferError, ValueError)):
        SharedGroup(bytes(8192), 0, 1)


def test_ctrl_c_ends_a_wait():
    group = SharedGroup(zeros(SharedGroup.required_bytes(2, 4096)), 0, 2)
    timer = threading.Timer(0.3, _thread.interrupt_main)
    # A suite that runs in the background was started with this signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            group.barrier(PATIENCE_S)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)


def messages() -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    lengths = [0, 1, 100, 64, 5000, 7, 200, 1000]  # around the ring and many times its length
    return [torch.randint(0, 256, (length,), generator=rng, dtype=torch.uint8) for length in lengths]


def send_all(name: str) -> None:
    memory = SharedMemory(name)
    assert memory.buf is not None
    mailbox = Mailbox(memory.buf)
    for message in messages():
        mailbox.send(message, PATIENCE_S)
    del mailbox
    memory.close()


@pytest.mark.parametrize("capacity", [64, 256, 1 << 16])
def test_mailbox_between_threads(capacity):
    buffer = zeros(Mailbox.required_bytes(capacity))
    sender, receiver = Mailbox(buffer), Mailbox(buffer)
    assert sender.capacity == capacity

    def send() -> None:
        for message in messages() * 5:
            sender.send(message, PATIENCE_S)

    thread = threading.Thread(target=send)
    thread.start()
    for i, message in enumerate(messages() * 5):
        if i % 2:
            assert receiver.recv(PATIENCE_S) == message.numpy().tobytes()
        else:
            out = zeros(6000)
            assert receiver.recv_into(out, PATIENCE_S) == len(message)
            assert torch.equal(out[: len(message)], message)
    thread.join()
    assert not receiver.ready()


def test_mailbox_between_processes():
    memory = SharedMemory(create=True, size=Mailbox.required_bytes(512))
    try:
        assert memory.buf is not None
        mailbox = Mailbox(memory.buf)
        process = PROCESSES.Process(target=send_all, args=(memory.name,))
        process.start()
        for message in messages():
            assert mailbox.recv(60.0) == message.numpy().tobytes()
        process.join(60)
        assert process.exitcode == 0
        del mailbox
    finally:
        memory.close()
        memory.unlink()


def test_mailbox_timeouts_can_be_tried_again_between_messages():
    buffer = zeros(Mailbox.required_bytes(64))
    sender, receiver = Mailbox(buffer), Mailbox(buffer)
    with pytest.raises(TimeoutError):
        receiver.recv(0.02)
    sender.send(b"x" * 56, 1.0)  # with its length, the ring is full
    with pytest.raises(TimeoutError, match="no room"):
        sender.send(b"y", 0.02)
    with pytest.raises(ValueError, match="56 bytes"):
        receiver.recv_into(bytearray(10), 1.0)
    assert receiver.recv(1.0) == b"x" * 56
    sender.send(b"y", 1.0)
    assert receiver.recv(1.0) == b"y"


def test_mailbox_aborts():
    buffer = zeros(Mailbox.required_bytes(64))
    sender, receiver = Mailbox(buffer), Mailbox(buffer)
    with pytest.raises(TimeoutError):  # half of the message is in the ring: nobody can go on
        sender.send(b"x" * 100, 0.02)
    with pytest.raises(CollectiveAborted):
        sender.send(b"y", 1.0)
    with pytest.raises(CollectiveAborted):
        receiver.recv(1.0)
