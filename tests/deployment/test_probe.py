"""What a host is found to have."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardline import _cpu
from shardline.deployment import probe
from shardline.deployment.generations import generation_of, generations
from shardline.deployment.machine import Device
from shardline.deployment.probe import probe_gpus, probe_machine, probe_torch
from shardline.kernels.torch import devices

H200 = "NVIDIA H200, 143771, 143000, 9.0, 570.86.15"
A100 = "NVIDIA A100-SXM4-80GB, 81559, 512, 8.0, 570.86.15"


@pytest.fixture
def fake_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{H200}'\necho '{A100}'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.11.0+cu130")
    return tool


def test_every_gpu_is_found(fake_tool: Path) -> None:
    large, small = 143771 << 20, 81559 << 20
    assert probe_gpus() == (
        [
            Device("cuda", "NVIDIA H200", large, 143000 << 20, capability="sm_90", identifier="0"),
            Device("cuda", "NVIDIA A100-SXM4-80GB", small, 512 << 20, "sm_80", identifier="1"),
        ],
        "",
    )


def test_only_visible_gpus_count(fake_tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool.write_text(f"#!/bin/sh\nfor word; do case $word in --id=GPU-7) echo '{A100}';; esac; done\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7")
    [found], _ = probe_gpus()
    assert (found.memory_total, found.memory_free, found.identifier) == (81559 << 20, 512 << 20, "GPU-7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert probe_gpus() == ([], "")


@pytest.mark.parametrize(("hip", "capability"), [("6.4.2", "gfx942"), (None, "sm_94")])
def test_devices_of_torch(
    hip: str | None, capability: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch calls AMD's GPUs cuda; their architecture comes with what is switched on."""
    properties = SimpleNamespace(major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-")
    for name, value in {
        "is_available": True,
        "device_count": 2,
        "mem_get_info": (5, 7),
        "get_device_name": "AMD Instinct MI300X",
        "get_device_properties": properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(sys, "argv", ["devices", "cuda"])
    devices.main()
    done = SimpleNamespace(stdout=capsys.readouterr().out)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found = probe_torch("cuda")
    assert found == [Device("cuda", "AMD Instinct MI300X", 7, 5, capability, identifier=str(n)) for n in range(2)]
    assert generation_of(found[0]) is generations()["gfx942" if hip else "sm_90"]


def test_no_gpu_where_the_tool_fails(fake_tool: Path) -> None:
    fake_tool.write_text("#!/bin/sh\nexit 9\n")
    assert probe_gpus() == ([], "")


def test_gpus_that_torch_cannot_use_are_told(fake_tool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert probe_gpus() == (
        [],
        "this host has 2 GPUs (NVIDIA H200), but torch 2.13.0+cpu was built without CUDA; install torch with CUDA",
    )
    assert probe_machine().hosts[0].unusable_gpus
    assert not probe_machine(gpus=False).hosts[0].unusable_gpus


@pytest.mark.parametrize(("cuda", "refused"), [(13, True), (12, False), (0, False), (99, False)])
def test_a_driver_that_is_too_old_for_torch_is_told(
    cuda: int, refused: bool, fake_tool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "cuda_of_torch", lambda: cuda)
    monkeypatch.setattr(probe, "probe_torch", lambda kind: [])
    found, why = probe_gpus()
    if refused:
        assert not found
        assert why == (
            "this host has 2 GPUs (NVIDIA H200), but its driver 570.86.15 is too old for torch 2.11.0+cu130 with CUDA "
            "13; install driver 580 or newer, or torch for an earlier CUDA"
        )
        monkeypatch.setattr(probe, "probe_torch", lambda kind: ["a card, with a package for compatibility"])
    else:
        assert not why
    assert len(probe_gpus()[0]) == 2


def test_a_driver_from_before_these_questions_is_told(fake_tool: Path) -> None:
    fake_tool.write_text("#!/bin/sh\necho 'Field \"compute_cap\" is not a valid field to query.'\nexit 2\n")
    assert probe_gpus() == (
        [],
        "this host has a GPU, but its driver is older than all that torch runs on; install a newer driver",
    )


def test_the_cuda_of_torch_is_known_without_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.cuda_of_torch() == int((torch.version.cuda or "0").partition(".")[0])
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert probe.cuda_of_torch() == 13


def test_page_cache_is_memory_that_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 700\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(probe, "_own_groups", lambda controller: [tmp_path])
    assert probe.available_host_memory() == 800
    assert probe.allowed_cpus() == min(2, len(os.sched_getaffinity(0)))
    [host] = probe_machine(gpus=False).hosts
    assert (host.free_memory, host.cores) == (800, probe.allowed_cpus())


def test_the_cpu_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDLINE_ISA", raising=False)
    [host] = probe_machine(gpus=False).hosts
    [cpu] = host.devices
    assert (cpu.kind, cpu.capability, cpu.cores) == ("cpu", _cpu.isa(), host.cores)
    assert 0 < cpu.memory_free <= cpu.memory_total
    monkeypatch.setenv("SHARDLINE_ISA", "portable")
    assert probe_machine(gpus=False).hosts[0].devices[0].capability == "portable"
