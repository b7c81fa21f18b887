"""Router policies, and the router that remembers prompts for them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardline.config.parallel import ParallelConfig
from shardline.config.router import RouterConfig
from shardline.planner.simulation.workload import Workload
from shardline.routing.policies import find_policy, policy_names
from shardline.routing.policies.base import Arrival, ReplicaLoad
from shardline.routing.router import CHUNK_BYTES, CHUNK_TOKENS, Router, hash_chunks

REPLICAS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9999), st.integers(0, 5)), min_size=1, max_size=6).map(
    lambda found: [ReplicaLoad(load, tokens, 2 * index, 20, warm) for index, (load, tokens, warm) in enumerate(found)]
)


def test_flags_name_the_policies_that_exist() -> None:
    assert ParallelConfig.__dataclass_fields__["router_policy"].metadata["choices"] == policy_names()
    with pytest.raises(ValueError, match=f"known are {', '.join(policy_names())}"):
        find_policy("random")


@given(st.sampled_from(policy_names()), REPLICAS, st.integers(0, 1000), st.integers())
def test_every_policy_chooses_one_of_the_replicas(
    name: str, replicas: list[ReplicaLoad], number: int, chunk: int
) -> None:
    arrival = Arrival(number, (chunk,))
    index = find_policy(name).choose(arrival, replicas)
    assert index in {replica.number for replica in replicas}
    assert find_policy(name).choose(arrival, replicas) == index


def loads(*requests: int) -> list[ReplicaLoad]:
    return [ReplicaLoad(count, 100 * count, index, 8) for index, count in enumerate(requests)]


def test_round_robin_takes_turns_and_least_loaded_looks_at_the_load() -> None:
    assert [find_policy("round_robin").choose(Arrival(number), loads(9, 0, 0)) for number in range(4)] == [0, 1, 2, 0]
    assert find_policy("least_loaded").choose(Arrival(0), loads(2, 1, 3)) == 1


def test_one_default_for_servers_the_router_and_the_simulator() -> None:
    assert ParallelConfig.router_policy == RouterConfig.policy == Workload.policy == "least_work"


@given(REPLICAS)
def test_the_default_balances_short_prompts_as_least_loaded_does(replicas: list[ReplicaLoad]) -> None:
    short = [replica._replace(warm_chunks=0) for replica in replicas]
    chosen, expected = (find_policy(name).choose(Arrival(0), short) for name in ("least_work", "least_loaded"))
    assert chosen == expected


def test_equal_prefixes_go_to_one_replica_until_it_has_too_much() -> None:
    choose = find_policy("prefix_hash").choose
    homes = {key: choose(Arrival(0, (key,)), loads(0, 0, 0, 0)) for key in range(400)}
    assert min(Counter(homes.values()).values()) > 60, "prefixes are spread evenly"
    moved = [key for key, home in homes.items() if choose(Arrival(0, (key,)), loads(0, 0, 0)) != home]
    assert all(homes[key] == 3 for key in moved), "only the prefixes of the lost replica move"
    busy = [replica._replace(num_requests=9 if replica.number == homes[0] else 1) for replica in loads(0, 0, 0, 0)]
    assert choose(Arrival(0, (0,)), busy) != homes[0]


def test_a_warm_replica_is_kept_until_it_is_saturated() -> None:
    router = Router("cache_aware")
    prompt, other = [7] * (3 * CHUNK_TOKENS + 5), [8] * CHUNK_TOKENS
    assert router.choose(prompt, "", loads(1, 0, 2)) == 1
    assert router.choose(prompt, "", loads(0, 7, 0)) == 1, "its cache is warm"
    assert router.choose(other, "", loads(0, 7, 1)) == 0
    assert router.choose(prompt, "salt", loads(1, 7, 0)) == 2, "another salt shares nothing"
    assert router.choose(prompt, "", loads(3, 8, 2)) == 2, "a saturated replica is passed over"
    router.forget_replica(2)
    assert router.choose(prompt, "", loads(0, 7, 0)) == 1


def test_only_so_many_chunks_are_remembered() -> None:
    router = Router("cache_aware", most_seen=2)
    prompts = [[number] * CHUNK_TOKENS for number in range(3)]
    for prompt in prompts:
        assert router.choose(prompt, "", loads(5, 0)) == 1
    assert router.choose(prompts[0], "", loads(0, 5)) == 0, "the oldest is forgotten"
    assert router.choose(prompts[2], "", loads(0, 5)) == 1


def test_hashes_cover_everything_before() -> None:
    first, second = hash_chunks([1] * 300, ""), hash_chunks([2] + [1] * 299, "")
    assert len(first) == 2
    assert not set(first) & set(second)
    assert hash_chunks([1] * (CHUNK_TOKENS - 1), "") == ()


def test_a_warm_replica_is_kept_until_waiting_costs_more_than_computing() -> None:
    router = Router("least_work")
    prompt = b"x" * 5 * CHUNK_BYTES
    assert router.choose(prompt, "", loads(1, 0, 0)) == 1
    assert router.choose(prompt, "", loads(0, 4, 0)) == 1, "five chunks elsewhere are more than four requests here"
    assert router.choose(prompt, "", loads(1, 6, 0)) == 2, "five chunks elsewhere are less than six requests here"
    assert router.choose(b"short", "", loads(3, 1, 2)) == 1, "without a prefix, the load decides"
    full = [ReplicaLoad(8, 0, 0, 8), ReplicaLoad(9, 0, 1, 20)]
    assert find_policy("least_work").choose(Arrival(0, (1, 2, 3)), full) == 1, "there, no request has to wait"


def test_a_long_prompt_goes_where_few_answers_stop_for_it() -> None:
    replicas = [ReplicaLoad(10, 0, 0, 20), ReplicaLoad(4, 0, 1, 20, pending_chunks=8)]
    choose = find_policy("least_work").choose
    assert [choose(Arrival(0, tuple(range(chunks))), replicas) for chunks in (0, 1, 8)] == [0, 0, 1]


def test_where_all_are_full_long_prompts_do_not_leave_the_long_queue_to_short_ones() -> None:
    """Else short prompts wait the longer, the more of them wait."""
    busy = [ReplicaLoad(12, 0, 0, 8, pending_chunks=5), ReplicaLoad(9, 0, 1, 8, pending_chunks=40)]
    choose = find_policy("least_work").choose
    assert [choose(Arrival(0, tuple(range(chunks))), busy) for chunks in (0, 2, 50)] == [0, 0, 0]


def test_without_prefix_caches_no_prompt_has_a_home() -> None:
    prompt = [7] * 4 * CHUNK_TOKENS
    for caches, homes in ((True, [0, 0]), (False, [0, 1])):
        router = Router("least_work", caches=caches)
        assert [router.choose(prompt, "", loads(*counts)) for counts in ((0, 0), (1, 0))] == homes
    assert router.decide(prompt, "", loads(0, 0)).cost == 4


def test_one_hot_prefix_does_not_thrash_a_replica() -> None:
    router, counts = Router("least_work"), [0, 0, 0, 0]
    for _ in range(400):  # none of them ends
        counts[router.choose(b"y" * 4 * CHUNK_BYTES, "", loads(*counts))] += 1
    assert max(counts) - min(counts) <= 5


@given(REPLICAS, st.integers(0, 10_000))
def test_the_less_loaded_of_two_is_never_the_most_loaded(replicas: list[ReplicaLoad], number: int) -> None:
    chosen = find_policy("power_of_two").choose(Arrival(number), replicas)
    assert len(replicas) == 1 or chosen != max(replicas).number


def test_two_are_drawn_evenly() -> None:
    choose = find_policy("power_of_two").choose
    counts = Counter(choose(Arrival(number), loads(0, 0, 0, 0)) for number in range(4000))
    assert choose(Arrival(0), loads(3)) == 0
    # Equal loads go to the one with the lower number: the first of four wins half of all pairs.
    assert [round(counts[index] / 4000, 1) for index in range(4)] == [0.5, 0.3, 0.2, 0.0]
