"""What the doctor says about given facts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shardline.config.engine import EngineConfig
from shardline.config.server import ServerConfig
from shardline.deployment import here
from shardline.deployment.interconnect import GpuLinks, topology
from shardline.deployment.machine import Device, DeviceKind, Host
from shardline.doctor import gather as gather_facts
from shardline.doctor.checks import check_cluster, check_deployment, check_node
from shardline.doctor.facts import Finding, Link, ModelFacts, NodeFacts, Port
from shardline.doctor.gather import GpuGather, KnownAnswers, gather

GIB = 1 << 30


def host(*gpus: str, capability: str = "sm_90", **options: Any) -> Host:
    cpu = Device("cpu", "CPU", 64 * GIB, 32 * GIB, capability="avx2", cores=8)
    devices = (cpu, *(Device("cuda", name, 80 * GIB, 80 * GIB, capability=capability) for name in gpus))
    usual: dict[str, Any] = {"name": "a", "free_memory": GIB, "cores": 8, "address": "10.0.0.1"}
    return Host(**({"devices": devices} | usual | options))


FAST = {"numerics": "fast"}


def facts(node: int = 0, **options: Any) -> NodeFacts:
    """A healthy node of a cluster of two."""
    healthy: dict[str, Any] = {
        "node": node,
        "num_nodes": 2,
        "host": host(name="ab"[node], address=f"10.0.0.{node + 1}"),
        "software": {"shardline": "1"},
        "flags": {"dtype": "auto"},
        "isas": ("portable", "avx2"),
        "known_answers": {"avx2": "a"},
        "shm_bytes": 16 * GIB,
        "open_files": 100_000,
        "name_addresses": (f"10.0.0.{node + 1}",),
        "model": ModelFacts("m/m", "/models/m", "d1"),
    }
    return NodeFacts(**healthy | options)


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    """Items and verdicts of all that is not ok. All of them have a fix."""
    found = [finding for finding in findings if finding.verdict != "ok"]
    assert all(finding.fix for finding in found)
    return [(finding.item, finding.verdict) for finding in found]


def test_nothing_is_wrong_with_healthy_nodes() -> None:
    links = [Link(0, 1, 1e-4, 1e9), Link(1, 0, 1e-4, 1.1e9)]
    assert bad(check_node(facts())) == []
    found = check_cluster([facts(), facts(1)], links, {1: 0.01})
    assert bad(found) == []
    assert {finding.item for finding in found} == {"versions and flags", "clocks", "latency", "TCP bandwidth"}


GPUS = host("H100", "H100")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"host": host(unusable_gpus="this host has 1 GPU; install torch")}, [("torch", "broken")]),
        ({"gpus": GpuLinks(error="nvidia-smi does not answer within 4 s")}, [("GPUs", "broken")]),
        ({"host": host("H100", "L40S")}, [("GPUs", "warning")]),
        ({"host": GPUS, "gpus": GpuLinks("1", without_peer_access=("0-1 CNS",))}, [("P2P", "warning")]),
        ({"host": GPUS, "gpus": GpuLinks("1", links=("SYS",))}, [("P2P", "warning")]),
        ({"host": GPUS, "gpus": GpuLinks("1", links=("NV18",))}, []),
        ({"host": GPUS, "nccl": {"NCCL_P2P_DISABLE": "1"}}, [("P2P", "warning")]),
        ({"host": GPUS, "shm_bytes": 64 << 20}, [("/dev/shm", "broken")]),
        ({"shm_bytes": 64 << 20}, []),
        ({"rdma": ("mlx5_0:1",), "memlock": 65536}, [("memlock", "broken")]),
        ({"rdma": ("mlx5_0:1",), "memlock": 65536, "has_ipc_lock": True}, []),
        ({"ports": (Port("--port", "::", 8000),), "open_files": 1024, "max_connections": 2176},
         [("open files", "warning")]),
        ({"open_files": 1024, "max_connections": 2176}, []),
        ({"name_addresses": ("127.0.1.1",)}, [("own name", "warning")]),
        ({"name_addresses": ()}, [("own name", "warning")]),
        ({"name_addresses": ("127.0.1.1",), "num_nodes": 1}, []),
        ({"address_error": "10.0.0.1 leads to 127.0.0.1; give --master-addr"}, [("address", "broken")]),
        ({"ports": (Port("--master-port", "10.0.0.1", 29501, "Address already in use"),)},
         [("--master-port", "broken")]),
        ({"ports": (Port("--port", "::", 8000, "used", served="ready"), Port("--master-port", "::", 1, "used"))}, []),
        ({"known_answers_error": "the avx2 kernels give other bits each time"}, [("kernels", "broken")]),
        ({"known_answers": {}}, [("kernels", "warning")]),
        ({"nccl_speed": 300e9}, []),
        ({"nccl_speed": 2e9}, [("NCCL", "warning")]),
        ({"nccl_error": "GPU 1: unhandled system error"}, [("NCCL", "broken")]),
        ({"model": ModelFacts("m/m", cache="/c", cache_free=GIB)}, [("model", "warning")]),
        ({"model": ModelFacts("m/m", error="model.safetensors.index.json names a file that is absent")},
         [("model", "broken")]),
        ({"host": Host("a", 1, 1, (Device("cpu", "CPU", 1, 1, capability="portable"),))}, [("CPU", "warning")]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_node_is_told_with_its_fix(options: dict[str, Any], expected: list[Any]) -> None:
    assert bad(check_node(facts(**options))) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {"software": {"shardline": "2"}}, [("version", "broken")]),
        ({}, {"build": "c0ffee"}, [("version", "broken")]),
        ({}, {"flags": {"dtype": "float32", "numerics": "fast"}}, [("flag", "broken"), ("flag", "broken")]),
        ({}, {"model": ModelFacts("m/m", "/models/m", "d2")}, [("model", "broken")]),
        ({}, {"model": ModelFacts("m/m")}, []),
        ({}, {"isas": ("portable",)}, [("CPU", "broken")]),
        ({"flags": FAST}, {"flags": FAST, "isas": ("portable",)}, [("CPU", "warning")]),
        ({"known_answers": {"avx2": "a"}}, {"known_answers": {"avx2": "b"}}, [("kernels", "broken")]),
        ({"known_answers": {"avx2": "a"}}, {"known_answers": {"avx2": "a", "avx512": "c"}}, []),
        ({"host": GPUS}, {"host": host("A100", capability="sm_80")}, [("GPUs", "broken"), ("RDMA", "warning")]),
        ({"host": GPUS}, {"host": host("H200")}, [("GPUs", "warning"), ("RDMA", "warning")]),
        ({"host": GPUS, "gpus": GpuLinks("550")}, {"host": GPUS, "gpus": GpuLinks("570")},
         [("drivers", "warning"), ("RDMA", "warning")]),
        ({"host": GPUS, "rdma": ("mlx5_0",)}, {"host": GPUS, "rdma": ("mlx5_0",)}, []),
        ({"host": GPUS, "rdma": ("mlx5_0",), "nccl": {"NCCL_IB_DISABLE": "1"}}, {"host": GPUS, "rdma": ("mlx5_0",)},
         [("RDMA", "warning")]),
    ],
)  # fmt: skip
def test_what_differs_between_nodes(first: dict[str, Any], second: dict[str, Any], expected: list[Any]) -> None:
    assert bad(check_cluster([facts(**first), facts(1, **second)], [], {})) == expected


@pytest.mark.parametrize(
    ("there", "back", "skew", "expected"),
    [
        (Link(0, 1, error="10.0.0.2 port 4: timed out"), Link(1, 0, 1e-4, 1e9), 0.0, [("TCP", "broken")]),
        (Link(0, 1, 2e-3, 1e9), Link(1, 0, 2e-3, 1e9), 0.0, [("latency", "warning")]),
        (Link(0, 1, 1e-4, 1e7), Link(1, 0, 1e-4, 1e9), 0.0, [("TCP bandwidth", "warning")]),
        (Link(0, 1, 1e-4, 1e9), Link(1, 0, 1e-4, 9e9), 0.0, [("TCP bandwidth", "warning")]),
        (Link(0, 1, 1e-4, 1e9), Link(1, 0, 1e-4, 1e9), -7.0, [("clocks", "warning")]),
    ],
)
def test_what_is_wrong_with_a_link(there: Link, back: Link, skew: float, expected: list[Any]) -> None:
    found = check_cluster([facts(), facts(1)], [there, back], {1: skew})
    assert bad(found) == expected


def test_the_tables_of_nvidia_smi() -> None:
    table = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tNV12\tSYS\tPIX\t0-31\t0\n"
        "GPU1\tNV12\t X \tSYS\tPXB\t0-31\t0\n"
        "GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1\n"
        "NIC0\tPIX\tPXB\tSYS\t X \n\nLegend:\n\n  X    = Self\n"
    )
    assert topology(table) == [("0-1", "NV12"), ("0-2", "SYS"), ("1-2", "SYS")]
    peers = " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tCNS\tX\t\n\nLegend:\n  X = Self\n"
    assert topology(peers) == [("0-1", "OK")]
    assert topology("") == []


@pytest.mark.slow
def test_this_host_has_facts_that_travel() -> None:
    here = gather(EngineConfig.from_options(nnodes=2, master_addr="127.0.0.1", device="cpu"), ServerConfig(port=0))
    assert "127.0.0.1" in here.address_error
    assert here.host.cores > 0
    assert here.isas == tuple(here.known_answers)
    assert here.known_answers_error == ""
    assert len(here.model.digest) == 12
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(here), type=NodeFacts) == here


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_devices_of_torch_are_examined_as_serve_finds_them(kind: DeviceKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "probe_torch", lambda kind: [Device(kind, "a card", 16 * GIB, 15 * GIB)])
    monkeypatch.setattr(gather_facts, "KnownAnswers", NoAnswers)
    found = gather(EngineConfig.from_options(device=kind), ServerConfig(port=0))
    (one,) = [finding for finding in check_node(found) if finding.item == "GPUs"]
    assert one.verdict == "ok"
    assert one.text.startswith("1 x a card (" + {"xpu": "Intel", "mps": "Apple"}[kind] + ": computes in float32")
    config = EngineConfig.from_options(model="demo", device=kind)
    assert [finding.verdict for finding in check_deployment(config, [found])] == ["ok"]


class NoAnswers:
    """Spares the test a process with torch."""

    def collect(self, timeout: float) -> tuple[dict[str, str], str]:
        return {"portable": "a"}, ""


def test_kernels_of_a_busy_host_are_not_called_broken() -> None:
    assert KnownAnswers().collect(0.0) == ({}, "")


@pytest.mark.slow
def test_ranks_measure_how_fast_they_gather() -> None:
    """With gloo here; GPUs use NCCL."""
    speed, problem = GpuGather(2, "gloo", "cpu").collect(60.0)
    assert problem == ""
    assert 1e6 < speed < 1e12
    assert GpuGather(1).collect(0.0) == (0.0, "")


@pytest.mark.slow
def test_ranks_that_cannot_gather_are_named() -> None:
    speed, problem = GpuGather(2, "carrier-pigeons", "cpu").collect(60.0)
    assert speed == 0.0
    assert problem.startswith("GPU 0: ")
    assert "carrier-pigeons" in problem.lower()
