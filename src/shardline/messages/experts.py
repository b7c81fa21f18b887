"""The commands that move experts between the ranks that share a layer."""

from __future__ import annotations

from shardline.messages.control import Command


class ReadExperts(Command, frozen=True):
    """Begin to read the experts that come to this rank, beside the steps that follow. What was read before and not put
    in place is forgotten."""

    layer: int
    changes: tuple[tuple[int, int], ...]
    """(place, expert): what is in which place after the move."""


class LookAtExperts(Command, frozen=True):
    """How far `ReadExperts` is. The answer of a rank is an ExpertProgress."""


class PutExperts(Command, frozen=True):
    """Put the experts that were read in their places. All ranks have read theirs. The answer is the seconds it took."""


class ExpertProgress(Command, frozen=True):
    """How far a rank is with reading."""

    is_read: bool
    error: str = ""
    """Why they cannot be read, for people."""
