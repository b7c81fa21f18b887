"""What all ranks do besides steps, as one message that the front, the engine and the executors pass on unread."""

from __future__ import annotations

import msgspec

from shardline.channel import encode_message


class Command(msgspec.Struct, frozen=True, tag=True):
    """What a Control may carry: a subclass, and its handler in `runtime.control`. Nothing between reads it."""


class Probe(Command, frozen=True):
    """Do nothing. The answer says that the threads that run steps get on."""


class Control(msgspec.Struct, frozen=True, tag=True):
    """Front to engine, and engine to worker: execute a command between two steps, and answer with ControlDone."""

    number: int
    """The front counts from 1, and the engine from -1 downwards; 0: a probe of the engine."""
    command: bytes
    """An encoded Command."""

    @classmethod
    def carry(cls, number: int, command: Command) -> Control:
        """The message with this number that carries `command`."""
        return cls(number, encode_message(command))


class ControlDone(msgspec.Struct, frozen=True, tag=True):
    """Worker to engine, and engine to front: the answer to the Control with this number."""

    number: int
    values: tuple[bytes, ...] = ()
    """What each rank's handler has returned, encoded; a worker sends its own, an engine those of all ranks in order."""
    error: str = ""
    """Why a rank has refused the command, for people; all ranks go on."""
