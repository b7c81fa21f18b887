"""A deployment on this host: the one place that reads the model, looks at the hardware, and decides."""

from __future__ import annotations

import logging

from shardline.config.engine import EngineConfig
from shardline.deployment.deployment import Deployment
from shardline.deployment.layout import choose_layout
from shardline.deployment.probe import probe_machine
from shardline.deployment.resolve import resolve
from shardline.models.description import read_model

_log = logging.getLogger(__name__)


def resolve_here(config: EngineConfig) -> Deployment:
    """What runs where if `config` is asked for on this host; logs warnings and reasons. Downloads the model from the
    hub if it is not here yet.

    Raises:
        ValueError: the model, the layout or the memory does not allow it; the message says what would work.
    """
    machine = probe_machine(gpus=config.parallel.device != "cpu")
    choose_layout(config.parallel, machine)  # refuses what no model can have, before one is downloaded
    deployment = resolve(config, read_model(config.model), machine)
    for warning in deployment.warnings:
        _log.warning("%s", warning)
    if deployment.reasons:
        _log.info("chosen: %s", "; ".join(deployment.reasons))
    return deployment
