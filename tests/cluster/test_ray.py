"""Ray's share of the work, on a Ray cluster that does not exist. tests/faults/real_ray.py has real ones."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardline.channel import encode_message
from shardline.cluster.ray.cluster import RayCluster, Unreachable
from shardline.cluster.ray.driver import Driver
from shardline.cluster.ray.node import NodeStarter
from shardline.cluster.ray.nodes import RayNodes
from shardline.cluster.ray.placing import Demand, RayHost, config_of_node, demand_of, share_groups
from shardline.config.engine import EngineConfig
from shardline.deployment.machine import Machine
from shardline.messages.node import DriverFailed, StartDriver, StartNode
from tests.deployment.machines import GIB, gpu, host, resolve_on

TOKEN = "the-token-of-this-test-1"


def ray_host(name: str, free: float, total: float = 8.0, resource: str = "CPU") -> RayHost:
    return RayHost(name, f"10.0.0.{name}", {resource: total}, {resource: free})


class FakeReservation:
    def __init__(self, cluster: FakeCluster, host: RayHost, count: int) -> None:
        self.cluster, self.host, self.count = cluster, host, count
        self.messages: list[StartNode] = []
        self.end: tuple[int, str] | None = None
        self.released = False

    def gpus(self) -> str | None:
        return None

    def start_node(self, message: bytes) -> None:
        self.messages.append(msgspec.msgpack.decode(message, type=StartNode))
        self.end = None

    def find_node_end(self) -> tuple[int, str] | None:
        if self.host.node_id in self.cluster.cut:
            raise Unreachable(f"{self.host.address} does not answer")
        return self.end

    def release(self) -> None:
        self.released = True


class FakeCluster:
    """Hosts 1 (the front's), 2 and 3."""

    own_id = "1"

    def __init__(self, *free: float) -> None:
        self.free = free
        self.cut: set[str] = set()
        self.reservations: list[FakeReservation] = []
        self.closed = False

    def hosts(self) -> list[RayHost]:
        return [ray_host(str(number), free) for number, free in enumerate(self.free, 1)]

    def reserve(self, host: RayHost, demand: Demand, num_groups: int) -> FakeReservation:
        self.reservations.append(FakeReservation(self, host, num_groups))
        return self.reservations[-1]

    def close(self) -> None:
        self.closed = True


def config(**options: Any) -> EngineConfig:
    return EngineConfig.from_options(device="cpu", distributed_executor_backend="ray", **options)


def driver(cluster: FakeCluster, groups: tuple[int, ...] = (), **options: Any) -> Driver:
    return Driver(cluster, StartDriver(config(**options), TOKEN, groups))  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The driver's clock; tests set its one element."""
    now = [1000.0]
    monkeypatch.setattr("shardline.cluster.ray.driver.time.monotonic", lambda: now[0])
    return now


def test_the_own_host_is_filled_first_then_the_emptiest() -> None:
    hosts = [ray_host("1", 4), ray_host("2", 3), ray_host("3", 8)]
    shares = share_groups(Demand("CPU", 2, 5, 2), hosts, "2")
    assert [(share.host.node_id, share.num_groups) for share in shares] == [("2", 1), ("3", 4)]
    with pytest.raises(
        ValueError, match=re.escape("2 of them find no place; free are: 10.0.0.1 4 of 8, 10.0.0.2 3 of")
    ):
        share_groups(Demand("CPU", 2, 9, 2), hosts, "2")


def test_what_a_layout_needs() -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 2}
    assert demand_of(config(cpu_threads=4, **sizes), []) == Demand("CPU", 8, 6, 2)
    either = EngineConfig.from_options(**sizes)
    assert demand_of(either, [ray_host("1", 8)]).resource == "CPU"
    assert demand_of(either, [ray_host("1", 8, resource="GPU")]) == Demand("GPU", 2, 6, 2)


def test_ranks_are_placed_as_ray_has_reserved() -> None:
    def options(*ranks: int) -> Any:
        hosts = tuple(msgspec.structs.replace(host(name=f"n{n}"), num_ranks=count) for n, count in enumerate(ranks))
        return resolve_on(Machine(hosts), tensor_parallel_size=2, pipeline_parallel_size=2, device="cpu")

    assert [place.host for place in options(0, 2, 2).placements[0]] == [1, 1, 2, 2]
    assert [place.host for place in options(4, 0).placements[0]] == [0] * 4
    moved = options(2, 2).with_host(1, host(gpu(GIB, GIB), name="other"), options(2, 2).model)
    assert [one.name for one in moved.machine.hosts] == ["n0", "other"]
    assert moved.machine.hosts[1].num_ranks == 2


def test_nodes_start_with_their_number_and_the_launch_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    cluster = FakeCluster(1, 2, 1)
    placed = driver(cluster, pipeline_parallel_size=4).place()
    assert (placed.address, placed.groups, placed.gpus) == ("10.0.0.1", (1, 2, 1), None)
    assert [one.messages == [] for one in cluster.reservations] == [True, False, False]
    message = cluster.reservations[2].messages[0]
    assert (message.token, message.settings["NCCL_DEBUG"]) == (TOKEN, "WARN")
    expected = ("10.0.0.1", 3, 2, True)
    its = message.config.cluster
    assert (its.master_addr, its.nnodes, its.node_rank, its.is_headless) == expected
    assert config_of_node(config(), 0, 1, "10.0.0.1").cluster.has_nodes is False


def test_a_node_that_cannot_join_ends_the_launch(clock: list[float]) -> None:
    cluster = FakeCluster(1, 1)
    one = driver(cluster, pipeline_parallel_size=2)
    one.place()
    assert one.tend() is None
    cluster.reservations[1].end = (2, "shardline: error: the model is not here")
    clock[0] += 3
    message = "node 1 on 10.0.0.2 has ended with code 2: the model is not here"
    assert one.tend() == DriverFailed(message, user_error=True)


def test_lost_nodes_are_started_again_or_placed_anew(clock: list[float]) -> None:
    cluster = FakeCluster(1, 1, 1)
    one = driver(cluster, pipeline_parallel_size=2)
    one.place()
    first = cluster.reservations[1]
    one.note_present((0, 1))

    def tend_after(seconds: float) -> None:
        clock[0] += seconds
        assert one.tend() is None

    tend_after(60)
    assert len(first.messages) == 1
    one.note_present((0,))
    tend_after(3)
    assert len(first.messages) == 1, "a process that runs has some seconds to come back"
    first.end = (-9, "killed")
    tend_after(3)
    assert len(first.messages) == 2
    tend_after(13)
    assert len(first.messages) == 3, "it runs, and does not come back"
    one.note_present((0, 1))
    one.note_present((0,))
    other = "2" if first.host.node_id == "3" else "3"
    cluster.cut = {first.host.node_id}
    tend_after(3)
    assert first.released
    moved = cluster.reservations[-1]
    assert (moved.host.node_id, len(moved.messages)) == (other, 1)
    cluster.free, cluster.cut = (0, 0, 0), {"2", "3"}
    tend_after(3)
    assert moved.released
    tend_after(3)  # there is no place
    cluster.free, cluster.cut = (0, 0, 1), set()
    tend_after(3)
    assert (cluster.reservations[-1].host.node_id, cluster.reservations[-1].released) == ("3", False)
    one.close()
    assert cluster.closed
    assert all(reservation.released for reservation in cluster.reservations)


def test_a_second_driver_places_what_the_first_had_chosen(clock: list[float]) -> None:
    cluster = FakeCluster(2, 2)
    second = driver(cluster, (1, 2), pipeline_parallel_size=3)
    assert second.place().groups == (1, 2)
    assert second.tend() is None
    assert [(one.host.node_id, one.count, len(one.messages)) for one in cluster.reservations] == [
        ("1", 1, 0),
        ("2", 2, 1),
    ]


@pytest.mark.slow
def test_a_node_process_gets_its_secret_through_a_pipe() -> None:
    starter = NodeStarter()
    assert starter.find_end() == (-1, "it was not started")
    start = StartNode(config_of_node(config(), 1, 2, "127.0.0.1"), TOKEN, {})
    starter.start(encode_message(start), None)
    assert starter._process is not None
    for file in ("cmdline", "environ"):
        assert TOKEN.encode() not in Path(f"/proc/{starter._process.pid}/{file}").read_bytes()
    deadline = time.monotonic() + 30
    while (end := starter.find_end()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.1)
    assert end[0] == 2
    assert (starter.find_end() or end)[1].startswith("shardline: error: 127.0.0.1 leads to 127.0.0.1")
    starter.stop()


def test_without_ray_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=re.escape("pip install 'shardline[ray]'")):
        RayNodes(config())
    with pytest.raises(ValueError, match="Ray chooses the nodes; leave --nnodes"):
        RayNodes(config(nnodes=2, master_addr="10.0.0.1"))
    assert EngineConfig.from_options(data_parallel_backend="ray").places_with_ray


class NoRay(types.ModuleType):
    """Ray without a cluster on this host, which cannot start one either."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.calls: list[tuple[object, str | None]] = []
        self.exceptions = types.SimpleNamespace(RayError=RuntimeError)
        self.last = ""
        """The address that `ray start` has left on this host."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be what is imported as ray."""

        def find(asked: str, folder: str | None) -> str:
            if not self.last:
                raise ConnectionError("Could not find any running Ray instance.")
            return self.last

        services = types.ModuleType("ray._private.services")
        services.get_ray_address_from_environment = find  # type: ignore[attr-defined]
        modules = {"ray": self, "ray._private": types.ModuleType("ray._private"), "ray._private.services": services}
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def init(self, address: str, **_options: object) -> None:
        self.calls.append((address, os.environ.get("RAY_AUTH_MODE")))
        if address == "auto":
            raise ConnectionError("Could not find any running Ray instance. Please specify the one to connect to")
        raise RuntimeError("a long story\nTimed out waiting for a file")


def test_without_a_ray_cluster_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray turns on its token itself. It ignores a mode that is set after its import, but its servers do not."""
    ray = NoRay()
    ray.install(monkeypatch)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ValueError, match=r"no Ray cluster runs on this host.*`ray start --head`") as error:
        RayCluster()
    assert "\n" not in str(error.value)
    assert "Timed out waiting for a file" in str(error.value)
    assert ray.calls == [("auto", None), ("local", None)]


class Unanswered(Exception):
    """What grpc raises if nothing answers."""

    def code(self) -> Any:
        return types.SimpleNamespace(name="UNAVAILABLE")


def test_a_cluster_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's file with the last address stays when a cluster is killed, and `ray.init` tries it for minutes."""

    def call(body: bytes, timeout: float) -> None:
        assert timeout <= 5.0
        raise Unanswered

    grpc: Any = types.ModuleType("grpc")
    grpc.RpcError, grpc.StatusCode = Unanswered, types.SimpleNamespace(UNAUTHENTICATED="other")
    channel = types.SimpleNamespace(unary_unary=lambda *_, **__: call)
    grpc.insecure_channel = lambda address: contextlib.nullcontext(channel)
    monkeypatch.setitem(sys.modules, "grpc", grpc)
    ray = NoRay()
    ray.last = "10.0.0.9:6379"
    ray.install(monkeypatch)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match=r"no Ray cluster answers at 10\.0\.0\.9:6379 .*`ray stop --force` here"):
        RayCluster()
    assert ray.calls == []
