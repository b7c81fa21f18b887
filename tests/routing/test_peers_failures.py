"""Ways in which routers of others have failed, each with a fleet of replicas that compute one chunk at a time."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.routing.policies import find_policy
from shardline.routing.policies.base import Arrival, ReplicaLoad
from shardline.routing.router import CHUNK_BYTES, CHUNK_TOKENS, Router, hash_chunks

MOST_RUNNING = 64


class Fleet:
    """Replicas with endless caches, each of which computes prompts one after another."""

    def __init__(self, policy: str, speeds: Sequence[float]) -> None:
        """`speeds`: seconds per chunk."""
        self.router = Router(policy)
        self.speeds = speeds
        self.free_at = [0.0] * len(speeds)
        self.ending: list[list[float]] = [[] for _ in speeds]
        self.pending: list[list[tuple[float, int]]] = [[] for _ in speeds]
        self.cached: list[set[int]] = [set() for _ in speeds]
        self.taken: Counter[int] = Counter()
        self.hits = self.chunks = 0
        self.waits: list[float] = []

    def send(self, now: float, prompt: bytes, answer: float) -> int:
        """A request that holds its place for `answer` seconds after its first token; returns its replica."""
        for ends in self.ending:
            while ends and ends[0] <= now:
                heapq.heappop(ends)
        self.pending = [[one for one in pending if one[0] > now] for pending in self.pending]
        loads = [
            ReplicaLoad(
                len(ends), 0, number, MOST_RUNNING, pending_chunks=sum(cost for _, cost in self.pending[number])
            )
            for number, ends in enumerate(self.ending)
        ]
        decision = self.router.decide(prompt, "", loads)
        number = decision.number
        chunks = hash_chunks(prompt, "")
        missed = [chunk for chunk in chunks if chunk not in self.cached[number]]
        self.hits, self.chunks = self.hits + len(chunks) - len(missed), self.chunks + len(chunks)
        self.cached[number].update(chunks)
        first = max(now, self.free_at[number]) + (1 + len(missed)) * self.speeds[number]
        self.free_at[number] = first
        self.pending[number].append((first, decision.cost))
        heapq.heappush(self.ending[number], first + answer)
        self.taken[number] += 1
        self.waits.append(first - now)
        return number

    def wait(self, share: float) -> float:
        """The time to first token that so many of the requests are below."""
        return sorted(self.waits)[int(share * (len(self.waits) - 1))]


def text(name: object, chunks: int) -> bytes:
    return f"{name} ".encode().ljust(chunks * CHUNK_BYTES, b".")


def run(policy: str, make: Callable[[random.Random], bytes], speeds: Sequence[float] = (1.0,) * 4, load: float = 0.7):
    """Random arrivals of so much work that all replicas together are busy for a share of the time."""
    draw, fleet, now = random.Random(3), Fleet(policy, speeds), 0.0
    for _ in range(2500):
        now += draw.expovariate(load * sum(1 / speed for speed in speeds) / 9)
        fleet.send(now, make(draw), draw.expovariate(0.1))
    return fleet


def hot_prefix(draw: random.Random) -> bytes:
    return text("hot", 6) + text(draw.random(), 2)


def many_prefixes(draw: random.Random) -> bytes:
    return text(draw.randrange(40), 6) + text(draw.random(), 2)


def no_prefix(draw: random.Random) -> bytes:
    return text(draw.random(), draw.choice([1, 2, 4, 25]))


@pytest.mark.slow
@pytest.mark.parametrize("make", [hot_prefix, many_prefixes, no_prefix])
def test_it_is_never_worse_than_taking_turns(make) -> None:
    """A threshold between cache and load made the first token come later than with none (sglang#21199)."""
    for share in (0.5, 0.99):
        turns, loaded, ours = (
            run(policy, make).wait(share) for policy in ("round_robin", "least_loaded", "least_work")
        )
        assert ours <= 1.1 * min(turns, loaded), (share, turns, loaded, ours)


def test_a_hot_prefix_uses_all_replicas_and_stays_cached() -> None:
    """Hashing that ignores the load sent it to one replica, whose cache then thrashed (prime-rl#3255)."""
    fleet = run("least_work", hot_prefix)
    assert max(fleet.taken.values()) < 1.5 * min(fleet.taken.values())
    fleet = run("least_work", many_prefixes)
    endless = 1 - (40 * 6 + 2 * 2500) / fleet.chunks
    assert fleet.hits / fleet.chunks >= 0.9 * endless


@pytest.mark.slow
def test_a_slow_replica_gets_less_and_not_more() -> None:
    """One slow replica, whose cache looked empty, drew all new prompts to it (sglang#14305)."""
    for make in (no_prefix, many_prefixes):
        fleet = run("least_work", make, (6.0, 1.0, 1.0, 1.0))
        assert fleet.taken[0] < 0.6 * fleet.taken[1]
        assert fleet.wait(0.99) < run("round_robin", make, (6.0, 1.0, 1.0, 1.0)).wait(0.99)


def test_conversations_keep_their_homes_whoever_else_comes_and_goes() -> None:
    """Ties that rotate lose sessions (vllm#52463)."""
    fleet = Fleet("least_work", (0.001,) * 4)
    homes: dict[int, int] = {}
    for turn in range(12):
        for name in range(10):
            home = fleet.send(1000.0 * turn + 50 * name, text(name, 3 + turn), 1.0)
            assert homes.setdefault(name, home) == home
    assert len(set(homes.values())) == 4, "at no load, too, all caches are used"


def test_short_prompts_of_a_session_stay_together() -> None:
    router = Router("least_work")
    homes: dict[Any, int] = {}
    for turn in range(5):
        for number in range(8):
            idle = [ReplicaLoad(0, 0, index, 8) for index in range(4)]
            home = router.decide(b"short", "", idle, session=f"s{number}").number
            assert homes.setdefault(number, home) == home, turn
    assert sorted(Counter(homes.values()).values()) == [2, 2, 2, 2]


def test_short_prompts_that_come_alone_use_all_replicas() -> None:
    router = Router("least_work")
    idle = [ReplicaLoad(0, 0, index, 8) for index in range(4)]
    for prompts in ([b"Hi %d" % number for number in range(8)], [[number, 7] for number in range(8)]):
        assert Counter(router.choose(prompt, "", idle) for prompt in prompts) == dict.fromkeys(range(4), 2)


def test_prompts_of_token_ids_are_told_apart() -> None:
    """Those of equal length had one key."""
    router = Router("least_work")
    prompts = [[number] * CHUNK_TOKENS * 3 for number in range(8)]
    homes = [router.choose(prompt, "", [ReplicaLoad(0, 0, index, 8) for index in range(4)]) for prompt in prompts]
    assert Counter(homes) == dict.fromkeys(range(4), 2)
    assert len({hash_chunks(prompt, "") for prompt in prompts}) == 8


def test_what_is_remembered_is_bounded() -> None:
    """A trie grew until the router was killed (production-stack#687)."""
    router = Router("least_work", most_seen=100)
    for number in range(3000):
        router.choose(text(number, 5), "", [ReplicaLoad(0, 0, index, 8) for index in range(3)])
    assert all(len(seen) <= 100 for seen in router._seen.values())
    assert len(router._holders) <= 300


def test_what_a_cache_has_lost_is_forgotten_with_all_that_is_older() -> None:
    router, idle = Router("least_work"), [ReplicaLoad(0, 0, 0, 8)]
    prompts = [text(number, 4) for number in range(6)]
    for prompt in prompts:
        router.decide(prompt, "", idle)
    decision = router.decide(prompts[3], "", idle)
    assert decision.chosen.warm_chunks == 4
    router.correct(decision, 0.7)  # about what was expected
    assert len(router._seen[0]) == 24
    busy = router.decide(prompts[3], "", [ReplicaLoad(1, 0, 0, 8, pending_chunks=4)])
    router.correct(busy, 0.0)
    assert len(router._seen[0]) == 24, "the prompt may have been on its way to the cache"
    router.correct(decision, 0.0)
    assert [router.decide(prompt, "", idle).chosen.warm_chunks for prompt in (prompts[3], prompts[5], prompts[0])] == [
        4,
        4,
        0,
    ]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), st.tuples(*[st.integers(0, 12)] * 3)), max_size=25))
def test_the_choice_equals_brute_force(arrivals) -> None:
    router = Router("least_work")
    sent: list[set[Any]] = [set(), set(), set()]
    for numbers, counts in arrivals:
        prompt = b"".join(text(number, 1) for number in numbers)
        loads = [ReplicaLoad(count, 10 * count, index, 6) for index, count in enumerate(counts)]
        prefixes = [prompt[: CHUNK_BYTES * end] for end in range(1, len(numbers) + 1)]
        works = []
        for index, count in enumerate(counts):
            warm = 0
            while warm < len(prefixes) and prefixes[warm] in sent[index]:
                warm += 1
            waiting = max(0, count - 5)
            own = len(numbers) - warm
            works.append((own + own * min(count, 3) / 8 + count + 3 * waiting, count, len(sent[index]), index))
        decision = router.decide(prompt, "", loads)
        assert decision.number == min(works)[-1]
        sent[decision.number].update(prefixes or [prompt])
        for index, work in enumerate(works):
            assert f"r{index}={work[0]:.4g} (hit " in decision.explain(lambda number: f"r{number}")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6), st.integers(0, 100))
def test_simple_policies_equal_brute_force(loads, number: int) -> None:
    replicas = [ReplicaLoad(requests, tokens, 3 * index, 8) for index, (requests, tokens) in enumerate(loads)]
    turns, least = (find_policy(name).choose(Arrival(number), replicas) for name in ("round_robin", "least_loaded"))
    assert turns == replicas[number % len(replicas)].number
    assert all((one.num_requests, one.num_tokens) >= loads[least // 3] for one in replicas)
