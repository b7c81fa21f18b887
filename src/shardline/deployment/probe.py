"""Look at the hardware of this host, or of the container of this process; torch is not needed.

Only `interconnect` and `cpu_rates` look at it too.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import cast

from shardline import __version__, _cpu, env
from shardline.deployment.machine import Device, DeviceKind, Host, Machine

_CGROUPS = Path("/sys/fs/cgroup")
_GPU_FIELDS = "name,memory.total,memory.free,compute_cap,driver_version"
_GPU_QUERY = ("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits")
_GPU_TIMEOUT = 20.0
_TORCH_TIMEOUT = 60.0
_LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""By CUDA's major version, the first NVIDIA drivers that run it."""


def probe_machine(*, gpus: bool = True) -> Machine:
    """This host as a machine. Without `gpus` it does not look for GPUs, which saves the time of their driver."""
    cores, free = allowed_cpus(), available_host_memory()
    cpu = Device("cpu", "CPU", _host_memory("MemTotal"), free, capability=env.force_isa() or _cpu.isa(), cores=cores)
    found, unusable = probe_gpus() if gpus else ([], "")
    return Machine(
        (
            Host(
                name=socket.gethostname(),
                free_memory=free,
                cores=cores,
                devices=(cpu, *found),
                unusable_gpus=unusable,
            ),
        )
    )


def available_isas() -> tuple[str, ...]:
    """The CPU kernel paths that this host has, the fastest last."""
    return tuple(_cpu.available_isas())


def software_versions() -> dict[str, str]:
    """The versions on which the answers of a rank depend, and which all ranks must share."""
    versions = {
        "shardline": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": importlib.metadata.version("torch").partition("+")[0],
    }
    # Its compiler decides the bits of GPU kernels. Hosts without GPUs need not have it.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions["Triton"] = importlib.metadata.version("triton")
    return versions


def probe_gpus() -> tuple[list[Device], str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, from nvidia-smi.

    The second value is empty, unless GPUs exist that cannot be used: then it says why, and what to do about it.
    """
    visible = env.cuda_visible_devices()
    if visible == "":
        return [], ""
    query = _GPU_QUERY if visible is None else (*_GPU_QUERY, f"--id={visible}")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_GPU_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        if "not a valid field" not in str(getattr(error, "stdout", "")):
            return [], ""
        return [], "this host has a GPU, but its driver is older than all that torch runs on; install a newer driver"
    rows = [line for line in done.stdout.splitlines() if line.strip()]
    names = [str(index) for index in range(len(rows))] if visible is None else visible.split(",")
    devices = [_gpu(row, name) for row, name in zip(rows, names, strict=False)]
    if not devices:
        return [], ""
    version, cuda = importlib.metadata.version("torch"), cuda_of_torch()
    driver, needed = rows[0].rpartition(",")[2].strip(), _LEAST_DRIVERS.get(cuda, 0)
    here = f"this host has {len(devices)} GPU{'s' * (len(devices) > 1)} ({devices[0].name}), but"
    if version.endswith("+cpu"):
        return [], f"{here} torch {version} was built without CUDA; install torch with CUDA"
    # Packages for compatibility run newer CUDA on older drivers, which only torch can tell.
    if re.match(r"\d+\.", driver) and float(driver.partition(".")[0]) < needed and not probe_torch("cuda"):
        fix = f"install driver {needed} or newer, or torch for an earlier CUDA"
        return [], f"{here} its driver {driver} is too old for torch {version} with CUDA {cuda}; {fix}"
    return devices, ""


def cuda_of_torch() -> int:
    """The major version of the CUDA for which torch was built; 0: none. Importing torch would take seconds."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return 0
    found = re.search(r"^cuda\b.*'(\d+)\.", Path(torch.origin).with_name("version.py").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def probe_torch(kind: str) -> list[Device]:
    """The devices of a kind that torch finds, asked in a process of its own."""
    command = (sys.executable, "-m", "shardline.kernels.torch.devices", kind)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    devices = enumerate(map(json.loads, done.stdout.splitlines()))
    return [
        Device(cast("DeviceKind", kind), name, total, free, capability, identifier=str(index))
        for index, (name, total, free, capability) in devices
    ]


def available_host_memory() -> int:
    """Bytes of memory that are available, on the host and within every control group of this process."""
    available = _host_memory("MemAvailable")
    for group in _own_groups("memory"):
        limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
        used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            # Page cache counts as used, but the kernel gives it back when memory is needed.
            available = min(available, max(0, limit - used + _reclaimable(group)))
    return available


def allowed_cpus() -> int:
    """Cores that this process may use, by its affinity and the CPU quota of its control groups."""
    cores = len(os.sched_getaffinity(0))
    for group in _own_groups("cpu"):
        try:
            quota, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def _gpu(row: str, identifier: str) -> Device:
    """A GPU from one line of nvidia-smi, which has the fields _GPU_FIELDS."""
    name, total, free, capability, _ = (field.strip() for field in row.split(","))
    return Device(
        "cuda",
        name,
        int(total) << 20,
        int(free) << 20,
        capability=f"sm_{capability.replace('.', '')}",
        identifier=identifier,
    )


def _host_memory(field: str) -> int:
    """The value of a field of /proc/meminfo, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _own_groups(controller: str) -> list[Path]:
    """The folders of this process's control group and of its parents: version 2, and version 1 of `controller`."""
    folders: list[Path] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        folder = root / name.lstrip("/")
        while folder.is_relative_to(root):
            folders.append(folder)
            if folder == root:
                break
            folder = folder.parent
    return [folder for folder in folders if folder.is_dir()]


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
