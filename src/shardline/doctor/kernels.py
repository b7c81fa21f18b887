"""Which of the GPU's own kernels are proved on this host, for a model: the doctor's table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from shardline.checkpoints.description import read_model
from shardline.config.engine import EngineConfig
from shardline.deployment.here import probe_here
from shardline.deployment.kernel_cases import kernel_cases
from shardline.deployment.kernel_proofs import (
    StartChild,
    Verdict,
    cards_to_prove,
    prove_cases,
    start_child,
    verdicts_here,
)
from shardline.deployment.machine import Machine
from shardline.deployment.resolve import resolve


class CardProof(msgspec.Struct, frozen=True):
    """The verdicts about one kind of GPU."""

    card: str
    verdicts: Sequence[Verdict]


def prove_kernels(
    config: EngineConfig,
    machine: Machine | None = None,
    *,
    start: StartChild | None = None,
    name: str = "cuda:0",
) -> list[CardProof]:
    """Try the kernels that the model needs, on one GPU of each kind, and keep the verdicts for `shardline serve`.

    Without GPUs, or with torch's kernels only, there is nothing to try. `machine`, `start`, `name`: others for tests.

    Raises:
        ValueError: the model, the layout or the memory does not allow a start.
    """
    deployment = resolve(config, read_model(config.model), machine or probe_here(config))
    found = []
    for device in cards_to_prove(deployment):
        prove = partial(prove_cases, start=start or partial(start_child, gpu=device.identifier))
        verdicts = verdicts_here(kernel_cases(deployment), device, name, again=True, prove=prove)
        found.append(CardProof(f"{device.name} ({device.capability})", verdicts))
    return found
