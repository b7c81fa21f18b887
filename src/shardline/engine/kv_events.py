"""Tells subscribers what the KV cache holds, in vLLM's form (`messages.kv_events`)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from shardline.config.kv_events import KVEventsConfig, is_bound
from shardline.deployment.deployment import CachePlan
from shardline.engine.block_pool import BlockPool
from shardline.engine.context_pool import ContextPool
from shardline.engine.tiers import split_key
from shardline.messages.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
)

if TYPE_CHECKING:
    import zmq

_MEDIUM = "GPU"
"""vLLM's word for the memory in which steps read the cache, whatever the device."""


class KVEventLog:
    """What happened to one KV cache since it was last asked."""

    def __init__(self, pool: BlockPool | ContextPool) -> None:
        """`pool`: the one of the cache. It tells the log what it evicts, and then whoever keeps that."""
        self._events: list[KVEvent] = []
        self._keep, pool.on_evict = pool.on_evict, self._note_removed

    def note_stored(
        self, hashes: list[bytes], first: int, group: int, token_ids: list[int], block_size: int, salt: str
    ) -> None:
        """Blocks of a sequence from number `first` on were published; `hashes` are those of all its blocks so far."""
        new: list[BlockHash] = [_short(one) for one in hashes[first:]]
        parent = _short(hashes[first - 1]) if first else None
        extra = [[salt], *[None] * (len(new) - 1)] if salt and first == 0 else None
        self._events.append(
            BlockStored(new, parent, token_ids, block_size, None, _MEDIUM, None, extra_keys=extra, group_idx=group)
        )

    def _note_removed(self, content: bytes, block: int) -> None:
        """The pool gives a block to other content."""
        block_hash, group = split_key(content)
        self._events.append(BlockRemoved([_short(block_hash)], _MEDIUM, group))
        if self._keep is not None:
            self._keep(content, block)

    def note_cleared(self) -> None:
        """Nothing that was published is found any more."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events


def _short(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "big")


class KVEventPublisher:
    """Sends the batches of one replica, and the latest ones again to who asks for them."""

    def __init__(self, config: KVEventsConfig, replica: int) -> None:
        """Raises ValueError: it cannot listen there."""
        import zmq

        config = config.of_replica(replica)
        self._zmq = zmq
        self._replica = replica
        self._topic = config.topic.encode()
        self._encode = msgspec.msgpack.Encoder().encode
        self._num_sent = 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._context = zmq.Context()
        self._publisher = self._open(zmq.PUB, config.endpoint, bound=is_bound(config.endpoint), most=config.hwm)
        self._thread: threading.Thread | None = None
        if config.replay_endpoint:
            socket = self._open(zmq.ROUTER, config.replay_endpoint, bound=True, most=0)
            self._thread = threading.Thread(target=self._replay, args=(socket,), name="kv-replay", daemon=True)
            self._thread.start()

    def _open(self, kind: int, endpoint: str, *, bound: bool, most: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(most)
        try:
            if bound:
                socket.ipv6 = "[" in endpoint
                socket.bind(endpoint.replace("0.0.0.0", "*").replace("[::]", "*"))
            else:
                socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(f"kv_events_config: cannot listen on {endpoint}: {error}") from None
        return socket

    def publish(self, events: list[KVEvent]) -> None:
        """Send a batch. It never waits: what a slow subscriber has no room for is lost to it."""
        payload = self._encode(KVEventBatch(time.time(), events, self._replica))
        number = self._num_sent.to_bytes(8, "big")
        self._num_sent += 1
        self._publisher.send_multipart((self._topic, number, payload))
        self._sent.append((number, payload))

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Send the batches again from the number on that a subscriber asks for."""
        try:
            while True:
                client, *_, first = socket.recv_multipart()
                for number, payload in self._sent.copy():
                    if number >= first and len(first) == 8:
                        socket.send_multipart((client, b"", self._topic, number, payload))
                socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""))
        except self._zmq.ContextTerminated:
            socket.close()

    def close(self) -> None:
        """Stop."""
        self._publisher.close()
        self._context.term()
        if self._thread is not None:
            self._thread.join()


class KVEventFeed:
    """Passes on what the caches of an engine's replicas log."""

    def __init__(self, cache: CachePlan, first_replica: int, logs: Sequence[KVEventLog]) -> None:
        """`logs`: of the cache of each replica. Raises ValueError: as KVEventPublisher."""
        self._logs = logs
        replicas = range(first_replica, first_replica + len(logs)) if cache.events.publishes else ()
        self._publishers = [KVEventPublisher(cache.events, replica) for replica in replicas]
        self._keeps = cache.events_to_front
        self._kept: list[KVEvent] = []

    def tell(self) -> None:
        """Publish and keep what was logged since the last call."""
        for index, log in enumerate(self._logs):
            events = log.take()
            if events and self._publishers:
                self._publishers[index].publish(events)
            if self._keeps:
                self._kept += events

    def take(self) -> list[KVEvent]:
        """The events since the last call, if they are kept."""
        events, self._kept = self._kept, []
        return events

    def close(self) -> None:
        """Publish no more."""
        for publisher in self._publishers:
            publisher.close()
