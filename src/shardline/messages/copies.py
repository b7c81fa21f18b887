"""Copies of blocks between the pool and a second tier of the KV cache, as plans carry them and ranks answer."""

from __future__ import annotations

import msgspec


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """The content of a block in one KV group, and the slot of a tier to or from which every rank copies its part."""

    group: int
    block: int
    slot: int
    key: bytes
    """What the content is known by, see `engine.tiers.content_key`."""


class BlockCopies(msgspec.Struct, frozen=True, array_like=True):
    """What a plan copies before it computes anything: first all stores, then all fetches, each in their order."""

    stores: list[BlockCopy]
    fetches: list[BlockCopy]


class CopyCounts(msgspec.Struct, frozen=True, array_like=True):
    """What copies of blocks have come to. Times are in seconds."""

    stored_bytes: int = 0
    """Copied to the tier."""
    stored_seconds: float = 0.0
    fetched_bytes: int = 0
    """Copied back."""
    fetched_seconds: float = 0.0
    corrupt_blocks: int = 0
    """Parts of blocks that had another checksum when they were to be used."""
    written_bytes: int = 0
    """Written to files."""
    read_bytes: int = 0
    """Read from files."""
    file_errors: int = 0
    """Times that a file could not be written or read, or not in time, so that all were left alone for a while."""

    def __add__(self, other: CopyCounts) -> CopyCounts:
        names = CopyCounts.__struct_fields__
        return CopyCounts(*(getattr(self, name) + getattr(other, name) for name in names))


class CopyResult(msgspec.Struct, frozen=True, array_like=True):
    """What came of the copies of a plan: on a rank, or on all ranks of a replica."""

    lost_slots: list[int] = []
    """Slots of fetches whose content is lost, so that the blocks may have any."""
    late_slots: list[int] = []
    """Slots of fetches whose content is still being read. A later plan must fetch them again."""
    counts: CopyCounts = CopyCounts()
    """Since the last answer."""

    def __add__(self, other: CopyResult) -> CopyResult:
        return CopyResult(
            [*self.lost_slots, *other.lost_slots], [*self.late_slots, *other.late_slots], self.counts + other.counts
        )
