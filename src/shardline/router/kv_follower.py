"""Follows the KV events of the backends, so that the policy kv_aware knows what their caches hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from shardline.config.router import RouterConfig
from shardline.messages.kv_events import END_OF_REPLAY, KVEventBatch, read_batch
from shardline.router.fleet import Backend
from shardline.routing.kv_index import KVIndex

logger = logging.getLogger(__name__)

_REPLAY_SECONDS = 5.0
"""How long a publisher may be silent when it is asked for past batches."""
_IN_ONE_TURN = 16
"""Past batches that are read before anything else on the event loop has its turn."""


@dataclass(frozen=True)
class KVSource:
    """Where a rank publishes what its cache holds: addresses of ZeroMQ."""

    events: str
    replay: str | None


def sources(backend: Backend, config: RouterConfig) -> list[KVSource]:
    """Where a backend publishes: what is said of it, or the usual ports of its host."""
    spec = backend.spec
    if spec.events:
        replays = spec.replays or (None,) * len(spec.events)
        return [KVSource(*addresses) for addresses in zip(spec.events, replays, strict=True)]
    host = urlsplit(spec.url).hostname
    host = f"[{host}]" if host and ":" in host else host
    return [KVSource(f"tcp://{host}:{config.kv_events_port}", f"tcp://{host}:{config.kv_replay_port}")]


class KVFollower:
    """Subscribes to backends. What it misses it asks for; what cannot be had again makes it forget and begin anew."""

    def __init__(self, index: KVIndex, config: RouterConfig) -> None:
        import zmq.asyncio

        self._zmq = zmq
        self._config = config
        self._context = zmq.asyncio.Context()
        self._index = index

    async def follow(self, backend: Backend) -> None:
        """Follow all ranks of a backend until the task is cancelled."""
        ranks = enumerate(sources(backend, self._config))
        try:
            await asyncio.gather(*(self._follow_rank(backend.number, rank, source) for rank, source in ranks))
        finally:
            self._index.forget(backend.number)

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)

    async def _follow_rank(self, replica: int, rank: int, source: KVSource) -> None:
        reader = _Reader(self._index, replica, rank)
        with self._open(self._zmq.SUB, source.events) as socket:
            socket.subscribe(b"")
            await self._catch_up(reader, source)
            while True:
                frames = await socket.recv_multipart()
                if len(frames) != 3 or (batch := _read(frames[2], source)) is None:
                    continue
                number = int.from_bytes(frames[1], "big")
                if reader.is_old(number, batch):
                    continue
                if number != reader.next_number:
                    reader.restart_if_behind(number)
                    await self._catch_up(reader, source)
                    if reader.is_old(number, batch):
                        continue  # it was among them
                reader.take(number, batch)

    async def _catch_up(self, reader: _Reader, source: KVSource) -> None:
        """Read the batches that came before."""
        if source.replay is None:
            return
        count = 0
        async with contextlib.aclosing(self._replay(source, reader.next_number)) as batches:
            async for number, batch in batches:
                if not reader.is_old(number, batch):
                    reader.take(number, batch)
                count += 1
                if count % _IN_ONE_TURN == 0:
                    await asyncio.sleep(0)

    async def _replay(self, source: KVSource, first: int) -> AsyncGenerator[tuple[int, KVEventBatch], None]:
        assert source.replay is not None
        with self._open(self._zmq.DEALER, source.replay) as socket:
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                try:
                    async with asyncio.timeout(_REPLAY_SECONDS):
                        frames = await socket.recv_multipart()
                except TimeoutError:
                    logger.warning("%s sends no past batches", source.replay)
                    return
                if len(frames) < 3 or frames[-2] == END_OF_REPLAY:  # some send no topic here
                    return
                if (batch := _read(frames[-1], source)) is not None:
                    yield int.from_bytes(frames[-2], "big"), batch

    @contextlib.contextmanager
    def _open(self, kind: int, address: str) -> Iterator[Any]:
        socket = self._context.socket(kind)
        try:
            socket.linger = 0
            socket.ipv6 = True
            socket.connect(address)
            yield socket
        finally:
            socket.close()


class _Reader:
    """Where a subscription stands."""

    def __init__(self, index: KVIndex, replica: int, rank: int) -> None:
        self._index, self._replica, self._rank = index, replica, rank
        self.next_number = 0
        self._time = 0.0

    def is_old(self, number: int, batch: KVEventBatch) -> bool:
        """Whether the batch was read already: what a publisher that has started again sends has a later time."""
        return number < self.next_number and batch.ts <= self._time

    def restart_if_behind(self, number: int) -> None:
        """A lower number than expected: the publisher has started again, with an empty cache."""
        if number < self.next_number:
            self._index.forget(self._replica, self._rank)
            self.next_number = 0

    def take(self, number: int, batch: KVEventBatch) -> None:
        """Apply the next batch. If batches are missing before it, what they removed would be kept for ever: forget."""
        if number != self.next_number:
            self._index.forget(self._replica, self._rank)
        self._index.apply(self._replica, self._rank, batch.events)
        self.next_number, self._time = number + 1, batch.ts


def _read(payload: bytes, source: KVSource) -> KVEventBatch | None:
    try:
        return read_batch(payload)
    except ValueError as error:
        logger.warning("%s: %s", source.events, error)
        return None
