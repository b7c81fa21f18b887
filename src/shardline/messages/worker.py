"""The messages between an engine and its worker processes."""

from __future__ import annotations

import msgspec

from shardline.deployment.deployment import Deployment, KernelFallback, KVAllocation
from shardline.deployment.kv_budget import MemoryUse
from shardline.messages.control import Control, ControlDone
from shardline.messages.step import RankStep, StepResult
from shardline.segment.activity import Activity
from shardline.segment.progress import RankProgress


class RankReport(msgspec.Struct, frozen=True):
    """The report of one rank that is ready."""

    rank: int
    host: str
    pid: int
    device: str
    isa: str
    """CPU kernel path."""
    threads: int
    weight_bytes: int
    """In memory; what is read from files is not among them."""
    kv_bytes: int
    load_seconds: float
    memory: MemoryUse | None = None
    """The measurement that decides the size of the KV pool; None: the size was decided before."""
    known_answer: str = ""
    """A digest of what its kernels give for fixed numbers; empty: not computed."""
    fallbacks: tuple[KernelFallback, ...] = ()
    """The GPU's own kernels that it does without."""


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """Engine to worker, first message."""

    deployment: Deployment
    engine: int
    """Number of the engine in the deployment."""
    rank: int
    """Rank within the engine."""
    nonce: bytes = b""
    """A secret of this start. Ranks on several hosts prove to each other that they know it."""
    step_address: str = ""
    """Where the engine awaits a connection for steps; empty: they come over this channel, since the rank is on the
    engine's host."""


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """Engine to worker: one step. Steps run in the order of their messages."""

    step: RankStep


class AllocateCache(msgspec.Struct, frozen=True, tag=True):
    """Engine to worker: the size of the KV pool. If ranks measure, it is sent after all of them have measured."""

    allocation: KVAllocation


class StoreValue(msgspec.Struct, frozen=True, tag=True):
    """Engine to worker: the value that a StoreGet asked for."""

    key: str
    value: bytes | None
    """None: no rank has set it yet."""


class StoreCount(msgspec.Struct, frozen=True, tag=True):
    """Engine to worker: the sum after a StoreAdd."""

    key: str
    value: int


StepRequest = RunStep | Control
"""What a rank on another host gets over its connection for steps."""
WorkerRequest = StartWorker | AllocateCache | StoreValue | StoreCount | StepRequest


class RankMeasured(msgspec.Struct, frozen=True, tag=True):
    """Worker to engine: the weights are loaded, and the memory is measured."""

    memory: MemoryUse


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """Worker to engine: the weights are loaded, and the KV cache is allocated."""

    report: RankReport


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """Driver rank of a replica to engine: the tokens that a step has sampled."""

    result: StepResult


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """Worker to engine: the rank cannot go on. The process ends after this message."""

    rank: int
    message: str
    user_error: bool = False
    """The checkpoint or the configuration is at fault."""
    consequence: bool = False
    """The rank only lost its connection to another rank. The error should name that other rank."""


class StoreSet(msgspec.Struct, frozen=True, tag=True):
    """Worker to engine: a value for other ranks, for example the address on which this rank listens."""

    key: str
    value: bytes


class StoreGet(msgspec.Struct, frozen=True, tag=True):
    """Worker to engine: send this value."""

    key: str
    waits: bool = True
    """Whether to answer only once some rank has set it."""


class StoreAdd(msgspec.Struct, frozen=True, tag=True):
    """Worker to engine: add to a counter that all ranks share, and send the sum."""

    key: str
    amount: int


class RankStarted(msgspec.Struct, frozen=True, tag=True):
    """Node to engine, in the channel of a rank on another host: its process runs."""

    host: str
    pid: int


class RankBeat(msgspec.Struct, frozen=True, tag=True):
    """Node to engine, once a second for each rank on another host: how far it is."""

    activity: Activity
    progress: RankProgress
    expert_load: bytes
    """The rank's counters of tokens per expert, as int64."""


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """Node to engine: the last message in the channel of a rank on another host."""

    how: str
    """How its process ended, in words that follow its name."""
    code: int | None = None
    """The exit code; None: the process is stopped, or its host is lost."""
    host_lost: bool = False


StepReply = StepDone | ControlDone
"""What a rank on another host sends over its connection for steps."""
WorkerReply = (
    RankMeasured
    | RankReady
    | StepReply
    | RankFailed
    | StoreSet
    | StoreGet
    | StoreAdd
    | RankStarted
    | RankBeat
    | RankEnded
)
