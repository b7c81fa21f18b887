"""What is said of ranks that do not share the work."""

from __future__ import annotations

from typing import Any

from shardline.server.window.imbalance import EngineLoad, RankLoad, find_imbalances


def engine(
    *ranks: tuple[int, float, float], running: int = 8, index: int = 0, hosts: str = "aaaa", **more: Any
) -> EngineLoad:
    """`ranks`: the stage, the busy and the waiting share of each; `hosts`: a letter for each."""
    loads = [RankLoad(number, stage, hosts[number], *shares) for number, (stage, *shares) in enumerate(ranks)]
    return EngineLoad(index, loads, running, more.pop("layers", ()), **more)


def test_nothing_is_said_of_even_work_or_of_none() -> None:
    even = engine((0, 0.9, 0.1), (0, 0.85, 0.15), (1, 0.8, 0.1), (1, 0.8, 0.1))
    assert find_imbalances([even, engine((0, 0.8, 0.0), index=1)], "least_loaded") == []
    assert find_imbalances([engine((0, 0.01, 0.0), (0, 0.0, 0.01))], "least_loaded") == []


def test_a_slow_stage_is_named_with_the_flag_that_moves_layers() -> None:
    [said] = find_imbalances([engine((0, 0.95, 0.0), (1, 0.3, 0.6), layers=(20, 4))], "least_loaded")
    assert "stage 0 is busy 95%" in said
    assert "stage 1 only 30%" in said
    assert "--pipeline-stages (now 20,4)" in said


def test_stages_that_take_turns_need_requests() -> None:
    [said] = find_imbalances([engine((0, 0.45, 0.05), (1, 0.5, 0.1), running=1)], "least_loaded")
    assert "take turns, since only 1 request runs" in said
    assert "--tensor-parallel-size" in said


def test_a_rank_that_others_wait_for_is_named_with_its_cause() -> None:
    ranks = (0, 0.3, 0.6), (0, 0.9, 0.02)
    [on_one_host] = find_imbalances([engine(*ranks)], "least_loaded")
    assert "rank 0 waits 60% of the time, for rank 1, which is busy 90%" in on_one_host
    assert "--cpu-threads" in on_one_host
    [on_two] = find_imbalances([engine(*ranks, hosts="ab")], "least_loaded")
    assert "host b is slower than a" in on_two
    [experts] = find_imbalances([engine(*ranks, expert_skew=1.8, whole_experts=True)], "least_loaded")
    assert "1.8 times" in experts
    assert "--enable-expert-parallel" in experts


def test_replicas_that_get_unlike_work_are_named_with_the_policy() -> None:
    engines = [engine((0, 0.9, 0.0)), engine((0, 0.1, 0.0), running=1, index=1)]
    [said] = find_imbalances(engines, "prefix_hash")
    assert said.startswith("Replica 0 is busy 90% with 8 requests, replica 1 only 10% with 1")
    assert "--router-policy prefix_hash" in said
    assert "least_work" in said
