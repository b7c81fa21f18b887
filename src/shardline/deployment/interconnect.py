"""What connects the GPUs of this host with each other and with other hosts."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path

import msgspec

_SMI_SECONDS = 4.0
_DRIVER = Path("/proc/driver/nvidia/version")
_INFINIBAND = Path("/sys/class/infiniband")


class GpuLinks(msgspec.Struct, frozen=True):
    """What nvidia-smi says of the GPUs of a host together."""

    driver: str = ""
    error: str = ""
    """Why nvidia-smi says nothing although there is an NVIDIA driver."""
    without_peer_access: tuple[str, ...] = ()
    """Pairs of GPUs that cannot read each other's memory, with nvidia-smi's reason: "0-1 CNS"."""
    links: tuple[str, ...] = ()
    """Kinds of links between GPUs, as in `nvidia-smi topo -m`: NV12, PIX, PHB, SYS."""


def probe_gpu_links(device: str) -> GpuLinks:
    """What nvidia-smi says; nothing if `device` is "cpu". A driver that does not answer is an error."""
    if device == "cpu":
        return GpuLinks()
    try:
        drivers = _smi("--query-gpu=driver_version", "--format=csv,noheader").split()
    except FileNotFoundError:
        error = "there is an NVIDIA driver, but no nvidia-smi" if _DRIVER.exists() else ""
        return GpuLinks(error=error)
    except subprocess.TimeoutExpired:
        return GpuLinks(error=f"nvidia-smi does not answer within {_SMI_SECONDS:g} s")
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stdout", "") or str(error)
        return GpuLinks(error=f"nvidia-smi fails: {said.strip().splitlines()[0]}" if _DRIVER.exists() else "")
    if len(drivers) < 2:
        return GpuLinks(driver=drivers[0] if drivers else "")
    peers, links = "", ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        peers, links = _smi("topo", "-p2p", "r"), _smi("topo", "-m")
    without = tuple(f"{pair} {state}" for pair, state in topology(peers) if state != "OK")
    return GpuLinks(drivers[0], "", without, tuple(sorted({kind for _, kind in topology(links)})))


def topology(table: str) -> list[tuple[str, str]]:
    """The entries of a table of `nvidia-smi topo`, once for each pair of GPUs: ("0-1", "NV12")."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", table)
    rows = [line.split() for line in plain.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    if not rows:
        return []
    entries = [(row[0].removeprefix("GPU"), row[1:]) for row in rows if row[1] != "GPU1" and "X" in row]
    names = [name for name, _ in entries]
    return [
        (f"{name}-{names[other]}", cells[other])
        for index, (name, cells) in enumerate(entries)
        for other in range(index + 1, len(names))
    ]


def rdma_ports() -> tuple[str, ...]:
    """Active InfiniBand and RoCE ports, with their rates."""
    found = []
    for port in sorted(_INFINIBAND.glob("*/ports/*")):
        with contextlib.suppress(OSError):
            if "ACTIVE" in (port / "state").read_text():
                found.append(f"{port.parts[-3]}:{port.name} {(port / 'rate').read_text().strip()}")
    return tuple(found)


def _smi(*words: str) -> str:
    command = ["nvidia-smi", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True).stdout
