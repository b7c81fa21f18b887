"""Machines that do not exist."""

from __future__ import annotations

from shardline.checkpoints.description import read_models
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment
from shardline.deployment.machine import Device, Host, Machine
from shardline.deployment.resolve import resolve

GIB = 1 << 30


def gpu(total: int, free: int, *, name: str = "NVIDIA H100", capability: str = "sm_90", identifier: str = "") -> Device:
    return Device("cuda", name, total, free, capability=capability, identifier=identifier)


def host(
    *gpus: Device, name: str = "node", free_memory: int = 64 * GIB, cores: int = 16, unusable_gpus: str = ""
) -> Host:
    cpu = Device("cpu", "CPU", 2 * free_memory, free_memory, capability="avx512_bf16", cores=cores)
    numbered = [
        Device("cuda", one.name, one.memory_total, one.memory_free, one.capability, identifier=one.identifier or str(i))
        for i, one in enumerate(gpus)
    ]
    return Host(name, free_memory, cores, (cpu, *numbered), unusable_gpus=unusable_gpus)


def machine(*gpus: tuple[int, int], **options: int) -> Machine:
    """One host with GPUs of (bytes in all, bytes free)."""
    return Machine((host(*(gpu(*memory) for memory in gpus), **options),))  # type: ignore[arg-type]


def resolve_on(where: Machine, **options: object) -> Deployment:
    """What is decided for flat options on a machine."""
    config = EngineConfig.from_options(**options)
    return resolve(config, read_models(config), where)
