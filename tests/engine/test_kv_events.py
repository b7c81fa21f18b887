"""KV events: what a router learns from them is what the cache holds, and vLLM's subscribers can read them."""

from __future__ import annotations

import random
import socket
from typing import Any

import msgspec
import pytest

from shardline.config.kv_events import KVEventsConfig
from shardline.engine.kv_events import KVEventPublisher
from shardline.messages.kv_events import END_OF_REPLAY, AllBlocksCleared, BlockRemoved, BlockStored, read_batch
from shardline.messages.request import Request
from shardline.models.kv_groups import KVGroup
from shardline.routing.kv_index import KVIndex
from shardline.sampling_params import SamplingParams
from tests.engine.harness import FULL, Engine, Shape

WINDOWED = (KVGroup((0,), None), KVGroup((1,), 6))


def request(name: str, tokens: list[int], salt: str = "") -> Request:
    sampling = SamplingParams(max_tokens=3, temperature=0.0, seed=0)
    return Request(request_id=name, prompt_token_ids=tokens, sampling=sampling, cache_salt=salt)


@pytest.mark.parametrize("groups", [FULL, WINDOWED])
@pytest.mark.parametrize("tier_slots", [0, 7])
def test_an_index_that_follows_the_events_knows_what_the_cache_has(groups, tier_slots: int) -> None:
    draw = random.Random(5)
    engine = Engine(Shape(groups=groups, num_blocks=33, max_in_flight=2, tier_slots=tier_slots))
    kv = engine.scheduler.kv
    kv.log_events()
    index, hits = KVIndex(), 0
    assert kv.events is not None
    assert kv._hasher is not None
    starts = [[draw.randrange(9) for _ in range(24)] for _ in range(4)]
    for number in range(80):
        prompt = [*draw.choice(starts)[: draw.choice([8, 16, 24])], *(draw.randrange(9) for _ in range(9))]
        salt = draw.choice(["", "", "s"])
        engine.add(request(f"r{number}", prompt, salt))
        engine.run()
        index.apply(0, 0, kv.events.take())
        if number % 20 == 19:
            kv.reset_prefixes()
            index.apply(0, 0, kv.events.take())
            assert len(index) == 0
        probe = draw.choice(starts)
        hashes: list[bytes] = []
        kv._hasher.extend(hashes, salt, probe, 6)
        held = [any(kv.pool.find_block(one + suffix) for suffix in kv._suffixes) for one in hashes]
        expected = 4 * next((count for count, is_held in enumerate(held) if not is_held), 6)
        found = index.cached_tokens(probe, salt).get(0, 0)
        if not tier_slots:  # what comes back from the tier is not told
            assert found == expected
        assert found <= expected
        hits += found > 0
    assert hits > 10
    assert len(index) <= len(groups) * 32


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class VllmEvent(msgspec.Struct, tag=True):
    """What vLLM's subscriber takes: of these fields none may be absent."""


class Stored(VllmEvent, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Removed(VllmEvent, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class Cleared(VllmEvent, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


def test_a_subscriber_of_vllm_gets_every_batch_and_asks_for_those_that_it_missed() -> None:
    zmq = pytest.importorskip("zmq", reason="pip install pyzmq")
    ports = [free_port(), free_port()]
    endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
    published, replayed = (f"tcp://127.0.0.1:{port - 1}" for port in ports)
    config = KVEventsConfig(True, "zmq", published, replayed, topic="kv-events")
    publisher = KVEventPublisher(config, 1)  # a port further on
    context = zmq.Context()
    try:
        stored = BlockStored([1, 2], None, [5, 6, 7, 8], 2, None, "GPU", None, extra_keys=[["salt"], None], group_idx=0)
        publisher.publish([stored])
        sub, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        sub.connect(endpoints[0])
        sub.subscribe("kv-events")
        replay.connect(endpoints[1])
        sub.rcvtimeo = replay.rcvtimeo = 200
        while True:  # a subscription takes a moment
            publisher.publish([BlockRemoved([1], "GPU", 0), AllBlocksCleared()])
            try:
                topic, number, payload = sub.recv_multipart()
                break
            except zmq.Again:
                pass
        assert topic == b"kv-events"
        batch = msgspec.msgpack.decode(payload, type=Batch)
        assert batch.events == [Removed([1], "GPU", 0), Cleared()]
        assert (batch.data_parallel_rank, int.from_bytes(number, "big") > 0) == (1, True)
        replay.rcvtimeo = 10_000
        replay.send_multipart([b"", (0).to_bytes(8, "big")])
        again = [replay.recv_multipart()[1:] for _ in range(int.from_bytes(number, "big") + 2)]
        first = msgspec.msgpack.decode(again[0][2], type=Batch)
        assert first.events == [Stored([1, 2], None, [5, 6, 7, 8], 2, None, "GPU", None, [("salt",), None], 0)]
        assert again[-2][1:] == [number, payload]
        assert again[-1] == [b"", END_OF_REPLAY, b""]
        with pytest.raises(ValueError, match="cannot listen on"):
            KVEventPublisher(config, 1)
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_events_are_read_as_maps_and_as_arrays() -> None:
    now = BlockStored([b"a" * 16], 7, [1, 2], 2, None, "GPU", "x")
    fields = {"type": "BlockStored", **msgspec.structs.asdict(now), "kv_cache_spec_kind": "full_attention"}
    for events in ([fields], [["BlockStored", *msgspec.structs.astuple(now), "new"]]):
        assert read_batch(msgspec.msgpack.encode([1.5, [*events, ["Odd", 1], {"type": "Odd"}], 3])).events == [now]
    old = [["BlockStored", [1], None, [1, 2], 2, None], ["BlockRemoved", [1]], ["AllBlocksCleared"]]
    batch = read_batch(msgspec.msgpack.encode([1, old]))
    assert batch.events == [
        BlockStored([1], None, [1, 2], 2, None, None, None), BlockRemoved([1], None), AllBlocksCleared()
    ]  # fmt: skip
    assert batch.data_parallel_rank is None


@pytest.mark.parametrize(
    "content",
    [5, [], [1.0], [1.0, 5], ["x", []], [1.0, [["BlockStored", 5]]], [1.0, [5]], [1.0, [], "rank"], [1.0, [[]]]],
)
def test_what_is_no_batch_is_refused(content) -> None:
    with pytest.raises(ValueError, match="no batch of KV events"):
        read_batch(msgspec.msgpack.encode(content))
