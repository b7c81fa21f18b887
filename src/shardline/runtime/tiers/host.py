"""A rank's slots in host memory, and how they are filled from files."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch
from torch import Tensor

from shardline.kernels.block_copies import copy_block_in, copy_block_out
from shardline.kernels.memory import mapped_empty
from shardline.messages.copies import BlockCopies, BlockCopy, CopyCounts, CopyResult
from shardline.runtime.tiers.files import BlockFiles, CorruptFile

_log = logging.getLogger(__name__)

_ALIGNMENT = 64
_NUM_READERS = 4
_PATIENCE = 0.01
"""Seconds that a step waits for files if nobody computes meanwhile; what comes later is for a later step."""
LATE_SECONDS = 10.0
"""Time after which a file that is not read yet counts as lost."""
PAUSE_SECONDS = 60.0
"""How long files are left alone after they could not be written or read, or not in time."""


@dataclass(frozen=True, eq=False)
class _Content:
    """What a slot has."""

    key: bytes
    total: int
    """Its checksum."""


@dataclass(frozen=True, eq=False)
class _Reading:
    """A slot is being filled from a file. Until that is over, nobody else writes to it."""

    key: bytes
    began: float


@dataclass
class _Totals:
    """What `CopyCounts` has, as it adds up in several threads."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: CopyCounts = field(default_factory=CopyCounts)

    def add(self, **counts: float) -> None:
        with self.lock:
            self.counts += CopyCounts(**counts)  # type: ignore[arg-type]

    def take(self) -> CopyCounts:
        with self.lock:
            counts, self.counts = self.counts, CopyCounts()
        return counts


class HostTier:
    """Slots in host memory, each for a rank's part of a block; with files, each part that is stored is also written
    to one, and read again where a slot has something else.

    The thread that runs steps copies, and threads of its own read and write files. Every part has a checksum from the
    time when it leaves the pages, which is compared before anything uses it again.
    """

    def __init__(self, pages: Sequence[Sequence[Tensor]], num_slots: int, files: BlockFiles | None = None) -> None:
        """`pages`: for each KV group, the tensors [num_blocks, ...] of which a block is copied."""
        self._pages = pages
        self._sizes = [sum(one[0].numel() * one.element_size() for one in group) for group in pages]
        slot_bytes = -(-max(self._sizes) // _ALIGNMENT) * _ALIGNMENT
        self._memory = mapped_empty((num_slots, slot_bytes), torch.uint8)
        self._contents: list[_Content | _Reading | None] = [None] * num_slots
        self._files = files
        self._totals = _Totals()
        self._arrived = threading.Condition()
        self._paused_until = 0.0
        self._reads: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._writes: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        if files is not None:
            for jobs, count in ((self._reads, _NUM_READERS), (self._writes, 1)):
                for _ in range(count):
                    threading.Thread(target=_work, args=(jobs,), name="tier", daemon=True).start()

    def __del__(self) -> None:
        # The threads know the queues only, so that they keep no memory alive.
        for _ in range(_NUM_READERS):
            self._reads.put(None)
        self._writes.put(None)

    def copy_blocks(self, copies: BlockCopies, *, may_wait: bool) -> CopyResult:
        """Run the copies of a plan. `may_wait`: whether nothing else waits for this step."""
        started = time.perf_counter()
        for copy in copies.stores:
            self._store(copy)
        stored = time.perf_counter()
        if copies.stores:
            size = sum(self._sizes[copy.group] for copy in copies.stores)
            self._totals.add(stored_bytes=size, stored_seconds=stored - started)
        if copies.fetches and self._files is not None:
            for copy in copies.fetches:
                self._begin_read(copy)
            if may_wait:
                with self._arrived:
                    self._arrived.wait_for(lambda: not any(map(self._is_reading, copies.fetches)), _PATIENCE)
        lost: list[int] = []
        late: list[int] = []
        fetched, began = 0, time.perf_counter()
        for copy in copies.fetches:
            if self._is_reading(copy):
                late.append(copy.slot)
            elif self._fetch(copy):
                fetched += self._sizes[copy.group]
            else:
                lost.append(copy.slot)
        if copies.fetches:
            self._totals.add(fetched_bytes=fetched, fetched_seconds=time.perf_counter() - began)
        return CopyResult(lost, late, self._totals.take())

    def _slot(self, group: int, slot: int) -> Tensor:
        return self._memory[slot, : self._sizes[group]]

    def _store(self, copy: BlockCopy) -> None:
        if isinstance(self._contents[copy.slot], _Reading):
            return  # a slow file still fills it, for nobody; what is not stored is lost, which its fetch will find
        self._contents[copy.slot] = None  # whoever reads the slot meanwhile finds that it has changed
        total = copy_block_out(self._pages[copy.group], copy.block, self._slot(copy.group, copy.slot))
        content = self._contents[copy.slot] = _Content(copy.key, total)
        if self._files is not None and not self._is_paused:
            self._writes.put(lambda: self._write(copy, content))

    def _fetch(self, copy: BlockCopy) -> bool:
        """Whether the block has its content now."""
        content = self._contents[copy.slot]
        if not isinstance(content, _Content) or content.key != copy.key:
            return False
        if copy_block_in(self._slot(copy.group, copy.slot), self._pages[copy.group], copy.block) == content.total:
            return True
        self._contents[copy.slot] = None
        self._note_corruption(copy, "host memory has changed: test it (`dmesg | grep -i mce`)")
        return False

    def _note_corruption(self, copy: BlockCopy, what: str) -> None:
        self._totals.add(corrupt_blocks=1)
        _log.warning("KV offloading: block %s is corrupt and is computed again; %s", copy.key.hex(), what)

    # Files

    @property
    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def _pause(self, reason: str) -> None:
        if not self._is_paused:
            self._totals.add(file_errors=1)
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            _log.warning("KV offloading: %s; files are left alone for %.0f s", reason, PAUSE_SECONDS)

    def _is_reading(self, copy: BlockCopy) -> bool:
        """Whether what a fetch needs is on its way from a file, and not for too long."""
        reading = self._contents[copy.slot]
        if not isinstance(reading, _Reading) or reading.key != copy.key:
            return False
        if time.monotonic() - reading.began < LATE_SECONDS:
            return True
        self._pause(f"a file was not read within {LATE_SECONDS:.0f} s")
        return False

    def _begin_read(self, copy: BlockCopy) -> None:
        """Fill a slot from a file if it has something else."""
        content = self._contents[copy.slot]
        is_filled = isinstance(content, _Reading) or (content is not None and content.key == copy.key)
        if not is_filled and not self._is_paused:
            self._contents[copy.slot] = _Reading(copy.key, time.monotonic())
            self._reads.put(lambda: self._read(copy))

    def _read(self, copy: BlockCopy) -> None:
        """Runs in a thread of its own."""
        assert self._files is not None
        content: _Content | None = None
        memory = self._slot(copy.group, copy.slot)
        try:
            content = _Content(copy.key, self._files.read(copy.key, memory))
            self._totals.add(read_bytes=len(memory))
        except FileNotFoundError:
            pass
        except CorruptFile as error:
            self._note_corruption(copy, str(error))
        except OSError as error:
            self._pause(f"{error.filename} cannot be read: {error.strerror}")
        with self._arrived:
            self._contents[copy.slot] = content
            self._arrived.notify_all()

    def _write(self, copy: BlockCopy, content: _Content) -> None:
        """Runs in a thread of its own."""
        assert self._files is not None
        memory = self._slot(copy.group, copy.slot)
        try:
            if self._is_paused:
                return
            written = self._files.write(copy.key, memory, content.total, lambda: self._contents[copy.slot] is content)
        except OSError as error:
            self._pause(f"{error.filename or 'a file'} cannot be written: {error.strerror}")
        else:
            self._totals.add(written_bytes=written)


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job
