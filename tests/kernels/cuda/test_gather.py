"""Gathers over memory that ranks read from each other: the model of it here is host memory and threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardline.kernels.cuda.triton.gather import collect_columns, put_columns
from shardline.runtime.machines.cuda import symmetric as symmetric_module
from shardline.runtime.machines.cuda.symmetric import SymmetricGather
from shardline.runtime.parallel import distributed
from shardline.runtime.parallel.groups import RankGroups, make_single_rank_groups
from shardline.runtime.parallel.host_memory import HostCollectives
from shardline.runtime.worker import Worker
from tests.kernels.cuda.helpers import CPU, KERNELS
from tests.kernels.cuda.test_layouts import on_ranks, setup_of
from tests.kernels.cuda.test_model import PROMPT, step_of
from tests.models.checkpoints import make_checkpoint
from tests.runtime.ops.helpers import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_kernel_at_a_time")


class Handle:
    """torch's, for ranks that are threads."""

    def __init__(self, buffers: list[Tensor], barrier: threading.Barrier) -> None:
        self._barrier = barrier
        self.buffer_ptrs = [buffer.data_ptr() for buffer in buffers]

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        self._barrier.wait(timeout_ms / 1000)


def gathers_of(size: int, half_bytes: int) -> list[SymmetricGather]:
    buffers = [torch.full((2, half_bytes), 255, dtype=torch.uint8) for _ in range(size)]
    barrier = threading.Barrier(size)
    return [SymmetricGather(buffers[rank], Handle(buffers, barrier), 60.0) for rank in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_columns_and_rows_of_all_ranks_in_their_order(rng, dtype):
    widths, calls = [(3, 1100, 7), (1, 1, 1), (40, 40, 40), (0, 5, 2)], 2
    parts = [[torch.randint(-99, 99, (rows, sum(each)), generator=rng).to(dtype) for rows in (1, 6)] for each in widths]

    def work(gather_of_rank: SymmetricGather, rank: int) -> list[Tensor]:
        found = []
        for each, wholes in zip(widths, parts, strict=True):
            for whole in wholes * calls:
                mine = whole.split(list(each), dim=1)[rank]  # strided
                assert gather_of_rank.has_room(mine, max(each))
                found.append(gather_of_rank.gather_columns(mine, each))
                found.append(gather_of_rank.gather_rows(whole + rank))
        return found

    gathers = gathers_of(3, 6 * 1110 * 4)
    assert not gathers[0].has_room(torch.empty(7, 1, dtype=torch.float32), 1110)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(work, gathers, range(3)))
    for answer in answers:
        expected = iter(answer)
        for wholes in parts:
            for whole in wholes * calls:
                assert torch.equal(next(expected), whole)
                assert torch.equal(next(expected), torch.cat([whole + rank for rank in range(3)]))


def exchanges(rank: int, buffers: list[Tensor], arrived: list[int], rounds: int) -> Iterator[None]:
    """A rank's part in so many gathers; pauses wherever a rank may be slow."""
    turns, peers = torch.zeros(2, dtype=torch.int32), torch.tensor([buffer.data_ptr() for buffer in buffers])
    for turn in range(rounds):
        put_columns(torch.full((1, 2), 100.0 * turn + rank), buffers[rank], turns)
        yield
        arrived[rank] += 1
        while min(arrived) <= turn:
            yield
        out = torch.empty(1, 2 * len(buffers))
        collect_columns(peers, 2, None, 2, out, turns)
        assert out.tolist() == [[100.0 * turn + peer for peer in range(len(buffers)) for _ in range(2)]]
        yield


class Group:
    """A process group of one, as far as DistributedCollectives asks."""

    def __init__(self) -> None:
        self.gathered = 0

    def __call__(self, out: Tensor, part: Tensor, **group: object) -> None:
        self.gathered += 1
        out.copy_(part)


def test_small_and_equal_parts_go_over_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl, [symmetric] = Group(), gathers_of(1, 400)
    monkeypatch.setattr(distributed, "all_gather", nccl)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 1)
    progress = make_single_rank_groups().progress
    collectives = distributed.DistributedCollectives(KERNELS, nccl, CPU, progress, symmetric)  # type: ignore[arg-type]
    small, large = torch.arange(100.0).view(4, 25), torch.arange(104.0).view(4, 26)
    for part, over_nccl in ((small, 0), (large, 2)):
        assert torch.equal(collectives.all_gather_columns(part, [part.shape[1]]), part)
        assert torch.equal(collectives.all_gather_rows(part, [4]), part)
        assert nccl.gathered == over_nccl
    monkeypatch.setattr(symmetric._handle, "barrier", lambda *_: (_ for _ in ()).throw(RuntimeError("timed out")))
    with pytest.raises(TimeoutError):
        collectives.all_gather_columns(small, [25])


def test_gpus_that_nothing_is_known_of_have_no_symmetric_memory() -> None:
    assert not symmetric_module._are_linked([0, 1])


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4))
def test_nobody_overwrites_what_a_slow_rank_still_reads(seed: int, size: int) -> None:
    """In any order in which ranks get on: one barrier a gather is enough for two halves."""
    order = random.Random(seed)
    buffers, arrived = [torch.zeros(2, 2) for _ in range(size)], [0] * size
    running = [exchanges(rank, buffers, arrived, 4) for rank in range(size)]
    while running:
        chosen = order.choice(running)
        if next(chosen, running) is running:
            running.remove(chosen)
    assert arrived == [4] * size


def test_ranks_that_gather_so_have_the_bits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("deepseek_v3", tmp_path, num_hidden_layers=1)
    steps = [(PROMPT[:6], 0), ([40], 6)]

    def logits(worker: Worker, groups: RankGroups) -> list[Tensor]:
        stage, head = worker.stage, worker.stage.lm_head
        assert head is not None
        local = [stage.forward(step, stage.embed(step)) for step in (step_of(*given) for given in steps)]
        return [groups["tensor"].all_gather_columns(part, [span.size for span in head.spans]) for part in local]

    [expected] = on_ranks(setup_of(tmp_path), logits)
    gathers, calls = gathers_of(3, 1 << 16), []

    def columns(group: HostCollectives, local: Tensor, widths: list[int]) -> Tensor:
        calls.append(group.rank)
        return gathers[group.rank].gather_columns(local, widths)

    monkeypatch.setattr(HostCollectives, "all_gather_columns", columns)
    monkeypatch.setattr(HostCollectives, "all_gather_rows", lambda g, local, counts: gathers[g.rank].gather_rows(local))
    for answers in on_ranks(setup_of(tmp_path, tensor_parallel_size=3), logits):
        for ours, theirs in zip(answers, expected, strict=True):
            assert_same_bits(ours, theirs)
    assert len(calls) >= 3 * len(steps) * 5, "a layer has five"
