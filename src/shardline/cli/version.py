"""The output of `shardline --version`, made without importing torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import shardline
from shardline import env
from shardline.config.fields import format_bytes


def version_lines() -> list[str]:
    """Versions, and one line for each device."""
    lines = [
        f"shardline {shardline.__version__}",
        f"python {platform.python_version()} ({platform.system()} {platform.release()}, {platform.machine()})",
        f"torch {_package_version('torch')}",
        f"device: CPU, {_cpu_name()}, {_num_cpus()} cores, {_memory()}",
    ]
    lines += [f"device: GPU {gpu}" for gpu in _gpus()]
    visible = env.cuda_visible_devices()
    if visible is not None:
        lines.append(f"CUDA_VISIBLE_DEVICES={visible}")
    return lines


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


def _num_cpus() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory() -> str:
    try:
        return format_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return "memory unknown"


def _gpus() -> list[str]:
    """One line for each NVIDIA GPU: index, name, memory; empty without a driver."""
    command = ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
