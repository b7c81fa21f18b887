"""What travels between an engine and its worker processes."""

from __future__ import annotations

import msgspec

from shardline.deployment.deployment import Deployment, KVAllocation
from shardline.types import RankStep, StepResult


class MemoryUse(msgspec.Struct, frozen=True):
    """What a GPU holds beside a rank's KV cache, in bytes, as the rank measured it."""

    total: int
    """Of the GPU."""
    others: int
    """Held by the driver, the kernels' code, the groups' buffers and other processes."""
    weights: int
    step: int
    """Most that a step takes beside."""
    graphs: int
    """What capturing decode steps will take."""

    def room(self, share: float) -> int:
        """What is left for the KV cache if `share` of the GPU may be used; negative: that much is missing."""
        return int(self.total * share) - self.others - self.weights - self.step - self.graphs


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
    memory: MemoryUse | None = None
    """What the size of the KV pool follows from; None: it was decided before."""


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """Engine to worker, first message."""

    deployment: Deployment
    engine: int
    """Which of the deployment's engines."""
    rank: int
    """Within the engine."""
    store_path: str
    """File through which gloo's ranks meet; empty: collectives through the shared segment."""


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Engine to worker: one step; plans are run in the order they come."""

    step: RankStep


class AllocateCache(msgspec.Struct, frozen=True, tag=True):
    """Engine to worker: the size of the KV pool; on GPUs once all ranks have measured."""

    allocation: KVAllocation


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Engine to worker, and front to engine: answer with ProbeDone, from the thread that runs steps."""

    number: int


WorkerRequest = StartWorker | RunStep | AllocateCache | Probe


class RankMeasured(msgspec.Struct, frozen=True, tag=True):
    """Worker to engine: weights are loaded, and this is what a step needs beside them."""

    memory: MemoryUse


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


class ProbeDone(msgspec.Struct, frozen=True, tag=True):
    """The answer to the Probe with this number."""

    number: int


WorkerReply = RankMeasured | RankReady | StepDone | RankFailed | ProbeDone
