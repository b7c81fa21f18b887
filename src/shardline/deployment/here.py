"""A deployment on this host: read the model, look at the hardware, decide."""

from __future__ import annotations

import logging

import msgspec

from shardline.checkpoints.description import read_models
from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment
from shardline.deployment.layout import choose_layout
from shardline.deployment.machine import Machine
from shardline.deployment.probe import probe_machine, probe_torch
from shardline.deployment.resolve import resolve

_log = logging.getLogger(__name__)


def probe_here(config: EngineConfig, *, has_driver: bool = True) -> Machine:
    """This host as a machine, without GPUs if the user wants none. `has_driver`: whether nvidia-smi is asked."""
    parallel = config.parallel
    machine = probe_machine(gpus=has_driver and parallel.device in ("auto", "cuda"))
    (host,) = machine.hosts
    if parallel.device in ("xpu", "mps"):
        return Machine((msgspec.structs.replace(host, devices=(*host.devices, *probe_torch(parallel.device))),))
    if parallel.device == "cuda" and parallel.kernels == "torch" and not host.of_kind("cuda"):  # AMD's GPUs
        return Machine((msgspec.structs.replace(host, devices=(*host.devices, *probe_torch("cuda"))),))
    return machine


def resolve_here(config: EngineConfig, machine: Machine | None = None) -> Deployment:
    """Decide what runs where on this host, or on a machine that begins with this host, and log warnings and reasons.

    The model is downloaded from the hub if it is not on this host yet.

    Raises:
        ValueError: the model, the layout or the memory does not allow it, or the watermark's key cannot be read. The
            message says what would work.
    """
    keys = () if config.model.watermark is None else (config.model.watermark.load_key(),)
    machine = machine or probe_here(config)
    choose_layout(config.parallel, machine)  # refuses what works for no model, before a download
    deployment = resolve(config, read_models(config), machine)
    for warning in deployment.warnings:
        _log.warning("%s", warning)
    if deployment.reasons:
        _log.info("chosen: %s", "; ".join(deployment.reasons))
    return msgspec.structs.replace(deployment, watermark=keys)
