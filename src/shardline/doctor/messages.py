"""The messages between the doctor on the head and those on the nodes."""

from __future__ import annotations

import msgspec

from shardline.doctor.facts import NodeFacts, Report
from shardline.messages.node import Connect, Listen, Listening, Measured


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Node to head, first message."""

    facts: NodeFacts


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Head to node: what is the time?"""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Node to head."""

    time: float
    """Seconds since 1970, by the node's clock."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Head to node: the node cannot take part."""

    message: str


class Rejoin(msgspec.Struct, frozen=True, tag=True):
    """What a head that serves answers to messages that it does not know."""


Command = Ping | Listen | Connect
FromHead = Ping | Listen | Connect | Refused | Rejoin | Report
FromNode = Hello | Pong | Listening | Measured
