"""The messages between a front and its engine processes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardline.deployment.deployment import Deployment
from shardline.deployment.fingerprint import NumericContract
from shardline.messages.control import Control, ControlDone
from shardline.messages.kv_events import KVEvent
from shardline.messages.request import Request, SequenceOutput
from shardline.messages.stats import EngineStats
from shardline.messages.worker import RankReport
from shardline.segment.activity import Activity


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    """Front to engine, first message."""

    deployment: Deployment
    replica: int
    """Which of the deployment's engines this is."""
    secret: bytes
    """The deployment's, drawn by its front: the keys of cached prefixes of all its engines begin with it."""


class AddRequests(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: requests to run."""

    requests: list[Request]


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: requests whose output nobody needs any more; unknown ids are ignored."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: later requests find nothing in the prefix cache that is there now."""


class StopEngine(msgspec.Struct, frozen=True, tag=True):
    """Front to engine: end now."""


FrontMessage = StartEngine | AddRequests | AbortRequests | ResetPrefixCache | Control | StopEngine


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: it can take requests."""

    max_model_len: int
    block_size: int
    contract: NumericContract
    max_concurrency: float
    """How many requests of `max_model_len` tokens the KV cache of a replica holds at once."""
    report: list[str]
    """The start-up log, line by line."""
    ranks: list[RankReport] = []
    """In their order."""

    @property
    def fingerprint(self) -> str:
        """The contract's name."""
        return self.contract.fingerprint


class EngineOutputs(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: what the last step produced."""

    outputs: Sequence[SequenceOutput]
    stats: EngineStats
    aborted: Sequence[str] = ()
    """Requests that were aborted as the front has asked: no output of them follows."""
    kv_events: Sequence[KVEvent] = ()
    """What happened to the prefix cache since the last message, if the front follows it."""


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """Engine to front: it cannot start or go on. The engine's process ends after this."""

    message: str
    """For people: what happened, on which rank and host, and what would help."""
    user_error: bool = False
    """The configuration is at fault, not the program."""
    host_lost: bool = False
    """The cause is the loss of a host or of the connection to it, not anything that the engine ran."""
    suspicious: bool = False
    """What it ran may be the cause: a step hung, or raised an error, or a process of it crashed."""
    stalled_for: float = 0.0
    """Seconds for which nothing had been done when this was noticed."""


class EngineBeat(msgspec.Struct, frozen=True, tag=True):
    """Node to front, once a second for an engine on another host: what it has done so far."""

    activity: Activity


EngineMessage = EngineBeat | EngineReady | EngineOutputs | EngineFailed | ControlDone
