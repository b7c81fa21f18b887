"""The policy kv_aware: a router that follows what the caches of its backends hold."""

from __future__ import annotations

import json
import random
import time
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.config.router import BackendSpec
from shardline.messages.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
)
from shardline.routing.kv_index import ENTRY_BYTES, KVIndex
from tests.router.backends import Call, Site

SIZE = 16


def stored(
    tokens: list[int], salt: str = "", start: int = 0, medium: str = "GPU", adapter: str | None = None
) -> KVEvent:
    """The full blocks of a sequence from a block on, named by all that they depend on."""
    names: list[int | bytes] = [
        hash((salt, adapter, *tokens[: end + SIZE])) % 2**63 for end in range(0, len(tokens) - SIZE + 1, SIZE)
    ]
    extra = [[salt], *[None] * (len(names) - 1)] if salt and not start else None
    return BlockStored(
        names[start:], names[start - 1] if start else None, tokens[start * SIZE : len(names) * SIZE], SIZE, None,
        medium, adapter, extra_keys=extra, group_idx=0,
    )  # fmt: skip


def removed(event: KVEvent, *indices: int, medium: str = "GPU") -> KVEvent:
    assert isinstance(event, BlockStored)
    return BlockRemoved([event.block_hashes[index] for index in indices], medium, 0)


def test_blocks_come_and_go_by_tokens_salt_and_adapter() -> None:
    index, tokens = KVIndex(), list(range(3 * SIZE + 5))
    index.apply(0, 0, [stored(tokens)])
    index.apply(1, 0, [stored(tokens[: 2 * SIZE]), stored(tokens, "s"), stored(tokens, adapter="a")])
    assert index.cached_tokens(tokens) == {0: 48, 1: 32}
    assert index.cached_tokens(tokens, "s") == index.cached_tokens(tokens, adapter="a") == {0: 0, 1: 48}
    index.apply(1, 0, [stored(tokens, start=2)])
    assert index.cached_tokens(tokens)[1] == 48, "a block goes on where its parent ends"
    index.apply(0, 0, [removed(stored(tokens), 1)])
    assert index.cached_tokens(tokens)[0] == 16
    index.apply(1, 0, [AllBlocksCleared()])
    assert index.cached_tokens(tokens) == {0: 16, 1: 0}


def test_a_block_is_there_until_its_last_copy_is_gone() -> None:
    index, tokens = KVIndex(), list(range(SIZE))
    event = stored(tokens)
    index.apply(0, 0, [event, stored(tokens, medium="CPU")])
    index.apply(0, 1, [event])
    for rank, medium, left in ((0, "GPU", 16), (0, "CPU", 16), (1, "GPU", 0)):
        index.apply(0, rank, [removed(event, 0, medium=medium)])
        assert index.cached_tokens(tokens) == {0: left}


def test_the_index_is_bounded_and_forgets_what_was_not_used() -> None:
    index = KVIndex(10 * ENTRY_BYTES)
    hot = [5] * SIZE
    index.apply(0, 0, [stored(hot)])
    for number in range(1000):
        index.apply(0, 0, [stored([number] * SIZE)])
        assert index.cached_tokens(hot) == {0: 16}
        assert len(index) <= 10


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_index_equals_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    index = KVIndex()
    caches = [(replica, rank) for replica in range(3) for rank in range(draw.choice((1, 2)))]
    truth: dict[tuple[int, int], set[tuple[int, ...]]] = {cache: set() for cache in caches}
    most_blocks = draw.choice((3, 6))

    def some_tokens() -> list[int]:
        return [one for one in (draw.randrange(2) for _ in range(draw.randrange(most_blocks + 1))) for _ in range(SIZE)]

    def prefixes(tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]

    for _ in range(60):
        cache, tokens = draw.choice(caches), some_tokens()
        blocks, event = prefixes(tokens), stored(tokens)
        what = draw.choice("SSSRC" if draw.random() < 0.2 else "SSR")
        if what == "S" and blocks:
            start = draw.randrange(len(blocks)) if draw.random() < 0.5 else 0
            index.apply(*cache, [stored(tokens, start=start)])
            if not start or blocks[start - 1] in truth[cache]:
                truth[cache].update(blocks[start:])
        elif what == "R" and blocks:
            place = draw.randrange(len(blocks))
            index.apply(*cache, [removed(event, place)])
            truth[cache].discard(blocks[place])
        elif what == "C":
            index.apply(*cache, [AllBlocksCleared()])
            truth[cache].clear()
        assert len(index) == sum(map(len, truth.values()))
        probe = some_tokens()
        most = draw.choice((len(probe), draw.randrange(len(probe) + 1)))
        found = index.cached_tokens(probe, most=most)
        for number in range(3):
            held = 0
            for block in prefixes(probe[:most]):
                if not any(block in truth[one] for one in caches if one[0] == number):
                    break
                held += SIZE
            assert found.get(number, 0) == held
    for replica in range(3):
        index.forget(replica)
    assert (len(index), len(index._holders), len(index._gaps)) == (0, 0, 0)


def test_events_that_make_no_sense_change_little() -> None:
    index, tokens = KVIndex(), list(range(2 * SIZE))
    index.apply(0, 0, [stored(tokens)])
    twice = BlockStored([7, 7, 7], None, [*range(100, 100 + 3 * SIZE)], SIZE, None, "GPU", None)
    huge = BlockStored([], None, [], 1 << 60, None, "GPU", None)
    index.apply(0, 0, [twice, huge, removed(stored(tokens, start=1), 0), removed(twice, 0, 1, 2)])
    assert index.cached_tokens(tokens) == {0: SIZE}
    assert index.cached_tokens(twice.token_ids) == {0: 0}
    index.forget(0)
    assert (len(index), len(index._holders), len(index._gaps)) == (0, 0, 0)


class Publisher:
    """An engine that publishes, on sockets of its own; what it sends can get lost."""

    def __init__(self, zmq, address: str, replay: str) -> None:
        self._zmq = zmq
        self.context = zmq.Context()
        self.socket, self.replay = self.context.socket(zmq.XPUB), self.context.socket(zmq.ROUTER)
        self.socket.bind(address)
        self.replay.bind(replay)
        self.sent: list[bytes] = []
        self.asked: list[int] = []

    def publish(self, *events: KVEvent, lost: bool = False, old_form: bool = False) -> None:
        batch: object = KVEventBatch(time.time(), list(events), 0)
        if old_form:
            arrays = [[type(event).__name__, *msgspec.structs.astuple(event)] for event in events]
            batch = [time.time(), arrays]
        self.sent.append(msgspec.msgpack.encode(batch))
        if not lost:
            self.socket.send_multipart([b"t", (len(self.sent) - 1).to_bytes(8, "big"), self.sent[-1]])

    def serve_replay(self) -> None:
        """Answer requests for past batches that have come."""
        while self.replay.poll(5):
            client, _, first = self.replay.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number in range(self.asked[-1], len(self.sent)):
                self.replay.send_multipart([client, b"", b"t", number.to_bytes(8, "big"), self.sent[number]])
            self.replay.send_multipart([client, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_a_router_follows_events_through_gaps_and_restarts(site: Site, tmp_path) -> None:
    zmq = pytest.importorskip("zmq", reason="pip install pyzmq")
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    publisher = Publisher(zmq, *addresses)
    prompts = [[number] * 64 * SIZE for number in range(6)]
    renders = True

    async def render(call: Call) -> None:
        tokens = prompts[int(call.fields["prompt"][0])] if call.path != "/v1/completions" else []
        if call.path.endswith("/render"):
            await call.answer(200 if renders else 404, [{"token_ids": tokens}])
        elif call.path == "/tokenize":
            await call.answer(200, {"count": len(tokens), "tokens": tokens})
        else:
            await call.answer(200, {"ok": True})

    try:
        publisher.publish(stored(prompts[0]), old_form=True)
        first, second = site.add_backend(render), site.add_backend(render)
        lines = tmp_path / "backends"
        lines.write_text(f"{first.url}\n{second.url} events={addresses[0]} replay={addresses[1]}\n")
        site.backends = []  # none comes by a flag
        site.start_router(policy="kv_aware", backends_file=str(lines))
        site.backends = [first, second]
        site.wait_for(lambda: [backend.is_ready for backend in site.fleet.backends] == [True, True])
        number = site.fleet.backends[1].number

        def held(prompt: int) -> int:
            return site.fleet.kv.cached_tokens(prompts[prompt]).get(number, 0)

        def settle(prompt: int, tokens: int) -> None:
            deadline = time.monotonic() + 15.0
            while held(prompt) != tokens:
                publisher.serve_replay()
                assert time.monotonic() < deadline, (prompt, held(prompt))

        settle(0, 1024)
        assert publisher.asked == [0], "what came before is asked for"
        while not publisher.socket.poll(5):
            publisher.serve_replay()
        publisher.publish(stored(prompts[1]))
        settle(1, 1024)
        publisher.publish(removed(stored(prompts[1]), 32), lost=True)
        publisher.publish(stored(prompts[2]))
        settle(2, 1024)
        assert held(1) == 32 * SIZE
        assert publisher.asked[1:] == [2], "only what was missed is asked for"
        answer = site.client.post(
            "/v1/completions", json={"model": "m", "prompt": "2" + 300 * " "}, headers={"x-shardline-route": ""}
        )
        assert answer.headers["x-shardline-route"].startswith(f"{second.url}; policy=kv_aware; attempt=1; work: ")
        assert f"{first.url}=8 (hit 0/8) {second.url}=0 (hit 8/8)" in answer.headers["x-shardline-route"]
        renders = False
        again = site.ask("2" + 300 * " ", stream=False)
        assert again.status_code == 200
        assert any(call.path == "/tokenize" for call in first.calls)
        direct = site.client.post(
            "/v1/completions", json={"model": "m", "prompt": prompts[2]}, headers={"x-shardline-route": ""}
        )
        assert direct.headers["x-shardline-route"].startswith(second.url)
        publisher.close()
        publisher = Publisher(zmq, *addresses)  # it has started again, and its cache is empty
        publisher.publish(stored(prompts[3]), lost=True)
        while not publisher.socket.poll(5):
            pass
        publisher.publish(stored(prompts[4]))
        settle(4, 1024)
        assert (held(2), held(3)) == (0, 1024)
        site.run(_remove(site, second.url))
        assert len(site.fleet.kv) == 0
    finally:
        publisher.close()


async def _remove(site: Site, url: str) -> None:
    site.fleet.remove(url)


def test_without_events_the_router_remembers_what_it_sent(site: Site) -> None:
    pytest.importorskip("zmq", reason="pip install pyzmq")

    async def no_render(call: Call) -> None:
        is_question = call.path.endswith(("/render", "/tokenize"))
        await call.answer(404 if is_question else 200, {"path": call.path})

    backends = [site.add_backend(no_render) for _ in range(2)]
    site.start_router(policy="kv_aware")
    for _ in range(3):
        for prompt in ("a" * 600, "b" * 600):
            assert site.ask(prompt).status_code == 200
    homes = [
        {json.loads(call.body)["prompt"][0] for call in one.calls if call.path == "/v1/completions"} for one in backends
    ]
    assert homes == [{"a"}, {"b"}], "equal load: each new prompt goes where least was seen, and stays there"
    asked = Counter(call.path for one in backends for call in one.calls if call.path != "/v1/completions")
    assert asked == {"/v1/completions/render": 2, "/tokenize": 2}, "each is asked once"


def test_what_names_backends_is_read_and_checked(tmp_path) -> None:
    from shardline.config.router import RouterConfig, read_backends_file

    file = tmp_path / "backends"
    file.write_text("# ours\nhttp://a:1/ events=tcp://a:5,ipc://x replay=tcp://a:6,tcp://a:7\n\nhttp://b\n")
    assert read_backends_file(str(file)) == [
        BackendSpec("http://a:1", ("tcp://a:5", "ipc://x"), ("tcp://a:6", "tcp://a:7")), BackendSpec("http://b")
    ]  # fmt: skip
    for text, message in (
        ("ftp://a", "line 1: backend: 'ftp://a' is no URL of a server"),
        ("http://a\nhttp://a/", "line 2: http://a is given twice"),
        ("http://a x=1", "'x=1' must be events=ADDRESS"),
        ("http://a events=http://b", "events must be like tcp://"),
        ("http://a events=tcp://b:1,tcp://b:2 replay=tcp://b:3", "as many addresses"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            RouterConfig(backends_file=str(file))
    with pytest.raises(ValueError, match="cannot read"):
        RouterConfig(backends_file=str(tmp_path / "none"))
