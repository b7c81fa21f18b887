"""What travels between an engine and its worker processes."""

from __future__ import annotations

import msgspec

from shardline.config.engine import EngineConfig
from shardline.types import RankStep, StepResult


class RankReport(msgspec.Struct, frozen=True):
    """What one rank says once it is ready."""

    rank: int
    host: str
    pid: int
    device: str
    isa: str
    """CPU kernel path."""
    threads: int
    weight_bytes: int
    kv_bytes: int
    load_seconds: float


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """Engine to worker, first message."""

    config: EngineConfig
    """Resolved."""
    rank: int
    store_path: str
    """File through which gloo's ranks meet; empty: collectives through the shared segment."""


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Engine to worker: one step; plans are run in the order they come."""

    step: RankStep


WorkerRequest = StartWorker | RunStep


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """Worker to engine: weights are loaded and the cache is there."""

    report: RankReport


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """Driver rank of a replica to engine: what a step sampled."""

    result: StepResult


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """Worker to engine: it cannot go on; the process ends after this."""

    rank: int
    message: str
    user_error: bool = False
    """The checkpoint or the configuration is at fault."""
    consequence: bool = False
    """It only lost touch with another rank, which is the one to name."""


WorkerReply = RankReady | StepDone | RankFailed
