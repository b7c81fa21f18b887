"""torch.distributed's groups form over the engine's store, on the interface of this host's address."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardline import env
from shardline.engine.executor.rank_store import RankStore
from shardline.messages.worker import StoreAdd, StoreGet, StoreSet
from shardline.runtime.control_store import ControlStore
from shardline.runtime.parallel.interface import interface_of
from shardline.runtime.parallel.torch_store import TorchStore


def control_stores(count: int) -> tuple[list[ControlStore], RankStore]:
    """The store of each rank, and the engine's. No message travels further than this process."""
    kept = RankStore()
    ranks: list[ControlStore] = []

    def connect(rank: int) -> ControlStore:
        def send(message: StoreSet | StoreGet | StoreAdd) -> None:
            for asking, answer in list(kept.handle(rank, message)):
                ranks[asking].put_answer(answer)

        return ControlStore(send)

    ranks += [connect(rank) for rank in range(count)]
    return ranks, kept


def stores(count: int, timeout: float = 20.0) -> tuple[list[TorchStore], RankStore]:
    ranks, kept = control_stores(count)
    return [TorchStore(store, timeout) for store in ranks], kept


def test_ranks_share_what_each_has() -> None:
    ranks, _ = control_stores(3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda rank: ranks[rank].share("x", b"%d" % rank, rank, 3, 20.0), range(3)))
    assert found == [[b"0", b"1", b"2"]] * 3
    with pytest.raises(TimeoutError, match=r"no rank has set y of rank 1 within 0\.05 s"):
        ranks[0].share("y", b"", 0, 2, 0.05)


def test_a_group_of_gloo_forms_over_the_channels_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ranks, _ = stores(3)

    def gather(rank: int) -> list[float]:
        store = dist.PrefixStore("tensor", ranks[rank])  # type: ignore[attr-defined]
        group: Any = dist.ProcessGroupGloo(store, rank, 3, timedelta(seconds=20))
        parts = [torch.zeros(1) for _ in range(3)]
        group.allgather([parts], [torch.tensor([float(rank)])]).wait()
        return [float(part) for part in parts]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(gather, range(3))) == [[0.0, 1.0, 2.0]] * 3


def test_values_counters_and_missing_ranks() -> None:
    (first, second), kept = stores(2, timeout=0.1)
    first.set("a", "text")
    first.set("b", b"bytes")
    assert (second.get("a"), second.get("b")) == (b"text", b"bytes")
    assert first.check(["a", "b"])
    assert first.clone() is first
    assert not first.delete_key("a")
    assert not second.check(["a", "c"])
    assert [first.add("n", 1), second.add("n", 2), first.add("n", 0)] == [1, 3, 3]
    with pytest.raises(dist.DistStoreError, match=r"timed out: no rank has set c within 0\.05 s"):
        second.wait(["a", "c"], timedelta(seconds=0.05))
    with pytest.raises(dist.DistStoreError, match=r"within 0\.1 s"):
        second.get("c")
    assert set(kept.waiting) == {1}
    first.set("c", b"late")
    assert second.get("c") == b"late"
    assert not kept.waiting


def test_the_interface_of_an_address_is_used_unless_the_user_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"192\.0\.2\.1 is not the first address of any interface"):
        interface_of("192.0.2.1")
    for before, after in (("lo", "eth7"), ("ib0", "ib0")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", before)
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", before)
        env.use_interface("eth7")
        assert env.for_children()["GLOO_SOCKET_IFNAME"] == after
        assert env.nccl_settings()["NCCL_SOCKET_IFNAME"] == before
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    env.use_interface("eth7")
    assert env.nccl_settings()["NCCL_SOCKET_IFNAME"] == "=eth7"
