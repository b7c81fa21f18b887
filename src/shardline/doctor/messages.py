"""The messages between the doctor on the head and those on the nodes."""

from __future__ import annotations

import msgspec

from shardline.doctor.facts import NodeFacts, Report


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Node to head, first message."""

    facts: NodeFacts


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Head to node: what is the time?"""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Node to head."""

    time: float
    """Seconds since 1970, by the node's clock."""


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Head to node: accept one connection, which begins with `key`, and count its bytes."""

    key: bytes


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Node to head."""

    port: int


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Head to node: connect to a listening node, and measure."""

    address: str
    port: int
    key: bytes
    seconds: float
    """How long to send."""


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Node to head: what came of Connect, or of Listen if there is an error."""

    latency: float = 0.0
    """Seconds of a round trip of one byte."""
    bytes_per_second: float = 0.0
    error: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Head to node: the node cannot take part."""

    message: str


class Rejoin(msgspec.Struct, frozen=True, tag=True):
    """What a head that serves answers to messages that it does not know."""


Command = Ping | Listen | Connect
FromHead = Ping | Listen | Connect | Refused | Rejoin | Report
FromNode = Hello | Pong | Listening | Measured
