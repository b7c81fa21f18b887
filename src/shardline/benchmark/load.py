"""When the requests of a run are sent, what is sent then, and what happened to each."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardline.benchmark.backends import RecordingExchange
from shardline.benchmark.http_client import HttpClient
from shardline.benchmark.workload import Record

_SENDS_AT_ONCE = 16


@dataclass(frozen=True)
class Planned:
    """One request, written, and when it is to be sent."""

    request: bytes
    time: float
    """Seconds after the start of the run."""
    prompt_len: int
    num_inputs: int = 1


@dataclass(frozen=True)
class RunTrace:
    records: list[Record]
    seconds: float
    """From the first intended send time to the last answer."""
    start: float
    """time.perf_counter() at the start."""
    cpu_seconds: float
    """Processor time of this process during the run."""
    paced: bool
    """Whether the requests had send times of their own, instead of being sent as soon as possible."""


class _Sender:
    """Starts exchanges, at most `max_concurrency` at a time."""

    def __init__(
        self, client: HttpClient, *, streams: bool, max_concurrency: int | None, on_done: Callable[[], object]
    ) -> None:
        self._client = client
        self._streams = streams
        self._free = self._unused = max_concurrency
        self._waiting: deque[tuple[bytes, Record]] = deque()
        self._on_done = on_done
        self._unfinished = 0
        self._all_done = asyncio.Event()
        self.closed_loop = False
        """Whether a request that waits for a place is intended to be sent when it gets one."""

    def submit(self, request: bytes, record: Record) -> None:
        """Send a request now, or when there is a place for it."""
        self._unfinished += 1
        if self._free == 0:
            self._waiting.append((request, record))
            return
        if self._free is not None and self._unused is not None:
            self._free -= 1
            self._unused -= 1
            if self._unused < 0 and self.closed_loop:
                # The place of a request that has ended before this one was submitted.
                record.intended = record.ready = time.perf_counter()
        self._start(request, record)

    async def wait_done(self) -> None:
        while self._unfinished:
            self._all_done.clear()
            await self._all_done.wait()

    def _start(self, request: bytes, record: Record) -> None:
        self._client.send(RecordingExchange(request, record, self._end, streams=self._streams))

    def _end(self, record: Record) -> None:
        self._unfinished -= 1
        self._on_done()
        if self._waiting:
            request, following = self._waiting.popleft()
            following.ready = time.perf_counter()
            if self.closed_loop:
                following.intended = following.ready
            self._start(request, following)
        elif self._free is not None:
            self._free += 1
        if not self._unfinished:
            self._all_done.set()


async def run_load(
    client: HttpClient,
    plan: Sequence[Planned],
    *,
    streams: bool,
    max_concurrency: int | None = None,
    on_done: Callable[[], object] = lambda: None,
) -> RunTrace:
    """Send every request at its own absolute time, so that a late one does not delay those after it.

    Args:
        plan: the requests in the order of their times.
        max_concurrency: the most requests that may run at a time. If none has a time of its own, this is a closed
            loop: a request is intended to be sent when another one has ended.
        on_done: called after every request.
    """
    sender = _Sender(client, streams=streams, max_concurrency=max_concurrency, on_done=on_done)
    paced = any(one.time > 0 for one in plan)
    sender.closed_loop = not paced
    records = []
    gc.collect()
    gc.freeze()
    try:
        cpu = time.process_time()
        start = time.perf_counter()
        for index, one in enumerate(plan):
            intended = start + one.time
            delay = intended - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            elif index % _SENDS_AT_ONCE == 0:
                await asyncio.sleep(0)  # answers that have come must be read even if sends are late
            record = Record(one.prompt_len, intended, intended, intended, num_inputs=one.num_inputs)
            records.append(record)
            sender.submit(one.request, record)
        await sender.wait_done()
        return RunTrace(records, time.perf_counter() - start, start, time.process_time() - cpu, paced)
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class Ramp:
    """A request rate that grows over the run."""

    strategy: str
    """"linear" or "exponential"."""
    start: float
    """Requests per second at the first request."""
    end: float
    """Requests per second at the last one."""

    def rates(self, count: int) -> np.ndarray:
        """The rate at each of `count` requests, [count]."""
        progress = np.arange(count) / max(count - 1, 1)
        if self.strategy == "linear":
            return np.asarray(self.start + (self.end - self.start) * progress)
        return np.asarray(self.start * (self.end / self.start) ** progress)


def arrival_times(
    count: int, rate: float, rng: np.random.Generator, *, burstiness: float = 1.0, ramp: Ramp | None = None
) -> list[float]:
    """The send times of `count` requests.

    Args:
        rate: requests per second; inf: all at once. A ramp replaces it.
        burstiness: shape of the gamma distribution of the gaps. 1 is a Poisson process, less is burstier, inf is even.

    With a constant rate, the times are scaled so that the last request is sent after `count / rate` seconds: runs with
    other seeds then offer the same load.
    """
    if ramp is None and math.isinf(rate):
        return [0.0] * count
    rates = ramp.rates(count) if ramp is not None else np.full(count, rate)
    # A linear ramp may begin at 0, where the gap has no end: the first request is sent at once.
    gaps = np.divide(1.0, rates, out=np.zeros(count), where=rates > 0)
    if not math.isinf(burstiness):
        gaps = rng.gamma(burstiness, gaps / burstiness)
    times = np.cumsum(gaps)
    if ramp is None and times[-1] > 0:
        times *= (count / rate) / times[-1]
    return [float(time) for time in times]
