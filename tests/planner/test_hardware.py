"""GPUs, links, and what users write."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardline.planner.cluster import parse_cluster
from shardline.planner.hardware import find_gpu, known_gpus

GPUS = known_gpus()


def test_every_gpu_is_complete() -> None:
    assert len(GPUS) == 23
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert 0.85 * gpu.memory_gb / 1.0737 < gpu.usable_gib <= gpu.memory_gb, name
        assert gpu.source
        assert gpu.link.pair_gbs <= gpu.link.gbs
        assert gpu.price is None or gpu.price.low <= gpu.price.high
    assert "fp8" not in GPUS["A100-80GB-SXM4"].tflops
    assert GPUS["A100-80GB-SXM4"].flops_per_second("fp8") == 312e12


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "H100-80GB-SXM5"),
        ("h100_sxm", "H100-80GB-SXM5"),
        ("H100-80GB-PCIe", "H100-80GB-PCIe"),
        ("h20", "H20-96GB-SXM"),
        ("5090", "RTX-5090"),
        ("RTX-PRO-6000", "RTX-PRO-6000-Blackwell-Server"),
        ("b300_sxm", "B300-SXM"),
        ("GB200", "GB200-NVL72"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("rtx5090 32GB", "RTX-5090"),
        ("A100-40G", "A100-40GB-SXM4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("mi355x_oam", "MI355X"),
        ("RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-Blackwell-Server"),
    ],
)
def test_names(written: str, name: str) -> None:
    assert find_gpu(written, GPUS).name == name


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown GPU 'H101-80GB'; the nearest are .*H100-80GB"):
        find_gpu("H101-80GB", GPUS)
    with pytest.raises(ValueError, match="the nearest are H100-80GB-SXM5"):
        find_gpu("H101", GPUS)


def test_clusters() -> None:
    two = parse_cluster("2x8xH100-80GB-SXM5", GPUS, inter_node="ib-400")
    assert (two.num_gpus, two.num_nodes, two.name) == (16, 2, "2x8xH100-80GB-SXM5")
    assert two.link_bytes_per_second(8) == 450e9
    assert two.link_bytes_per_second(16) == 50e9
    assert two.part(4).num_gpus == 4
    mixed = parse_cluster("A100-80GB-PCIe+2xL40S", GPUS)
    assert mixed.num_gpus == 3
    assert mixed.smallest.name == "L40S"
    assert mixed.link.kind == "pcie"
    assert parse_cluster("4xH100-80GB", GPUS, "pcie").gpus[0].name == "H100-80GB-PCIe"


def test_links_have_a_rate_for_each_pair_and_direction() -> None:
    mesh = parse_cluster("8xMI300X", GPUS)
    assert mesh.link_bytes_per_second(2) == 64e9
    assert mesh.link_bytes_per_second(8) == 448e9
    bridged = parse_cluster("4xA100-80GB-PCIe", GPUS, "bridge")
    assert bridged.link_bytes_per_second(2) == 300e9
    assert bridged.link_bytes_per_second(4) == 32e9


@pytest.mark.parametrize(
    ("gpus", "link", "network", "says"),
    [
        ("4xRTX-4090", "nvlink", None, "RTX-4090 cannot have it; use pcie"),
        ("4xH100-80GB-PCIe", "nvlink", None, "use pcie or bridge"),
        ("4xL4", "ring", None, "must be one of"),
        ("0xL4", None, None, "there must be 1 to"),
        ("2xL4", None, "fast", "for example ib-400"),
        ("2x2xL4+L40", None, None, "a sum describes one node"),
    ],
)
def test_what_cannot_be(gpus: str, link: str | None, network: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_cluster(gpus, GPUS, link, network)


def test_a_file_of_the_user_overrides(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        '["My-GPU"]\nvendor = "NVIDIA"\narchitecture = "Own"\ncapability = "sm_99"\nmemory_gb = 8\nusable_gib = 7\n'
        'bandwidth_gbs = 100\ntflops = { bf16 = 10 }\npcie_gbs = 8\nnetwork_gbs = 1\nsource = "me"\n'
        'link = { kind = "pcie", gbs = 8, pair_gbs = 8, domain = 8 }\n'
    )
    assert find_gpu("my-gpu", known_gpus(own)).usable_bytes == 7 << 30
    own.write_text('["My-GPU"]\nvendor = 3\n')
    known_gpus.cache_clear()
    with pytest.raises(ValueError, match=r"own\.toml"):
        known_gpus(own)
