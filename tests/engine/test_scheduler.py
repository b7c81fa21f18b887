"""What the scheduler promises, case by case."""

from __future__ import annotations

import logging
import random
from collections import deque
from itertools import pairwise

import pytest

from shardline.engine.scheduling.preemption import PreemptionLog, cheapest_victim
from shardline.engine.scheduling.sequence import LiveSequence
from shardline.messages.stats import EngineStats, merge_stats
from shardline.messages.step import SequenceResult, StepPlan, StepResult
from shardline.models.kv_groups import KVGroup
from tests.engine.fake_worker import make_request, next_token, reference
from tests.engine.harness import Engine, Shape


def shares(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    assert plan is not None
    return [(step.seq_id, step.start, step.num_tokens) for step in plan.steps]


def long_prompt(length: int, first: int = 1) -> list[int]:
    return [first, *(index * 7 % 5 for index in range(1, length))]


def test_one_budget_decodes_first() -> None:
    engine = Engine(Shape(max_num_batched_tokens=8))
    engine.add(make_request("a", [1, 2, 3], ignore_eos=True), make_request("b", long_prompt(20), ignore_eos=True))
    plans: list[object] = []
    while len(plans) < 5:
        plan = engine.submit()
        plans.append(shares(plan))
        engine.collect()
    assert plans == [
        [(0, 0, 3), (1, 0, 5)],
        [(0, 3, 1), (1, 5, 7)],
        [(0, 4, 1), (1, 12, 7)],
        [(0, 5, 1), (1, 19, 1)],
        [(0, 6, 1), (1, 20, 1)],
    ]
    assert [step.sample for step in engine.plans[2].steps] == [True, False]
    engine.run()
    engine.check_done()


def test_waiting_requests_start_by_priority_then_arrival() -> None:
    engine = Engine(Shape(max_num_seqs=1))
    engine.add(
        make_request("late", [1, 1], 1, arrival_time=3.0),
        make_request("early", [1, 2], 1, arrival_time=1.0),
        make_request("urgent", [1, 3], 1, arrival_time=5.0, priority=-1),
    )
    engine.run()
    assert list(engine.outputs) == ["urgent", "early", "late"]
    engine.check_done()


def test_decode_runs_ahead_of_its_tokens() -> None:
    engine = Engine(Shape(max_in_flight=3))
    engine.add(make_request("a", [1, 2], 5, ignore_eos=True))
    for _ in range(3):
        engine.submit()
    assert engine.scheduler.schedule() is None, "three plans are in flight already"
    assert [plan.steps[0].token_id for plan in engine.plans] == [1, -1, -1]
    engine.run()
    assert len(engine.plans) == 5, "no step beyond max_tokens"
    stats = engine.scheduler.stats()
    assert (sum(stats.step_tokens), stats.step_tokens[:2]) == (5, [4, 1])
    assert (stats.prompt_tokens, stats.generation_tokens) == (2, 5), "the tokens of these steps"
    assert merge_stats([stats, EngineStats(), stats]).step_tokens[:2] == [8, 2]
    engine.check_done()


def test_a_stop_is_noticed_late_and_the_surplus_dropped() -> None:
    prompt = next([1, n] for n in range(2000) if next_token([1, n], "") == 0)
    engine = Engine(Shape(max_in_flight=3))
    engine.add(make_request("a", prompt, 9))
    engine.turn()
    assert engine.finish_reason("a") == "stop"
    assert engine.scheduler.stats().kv_blocks_used > 0, "plans in flight still write them"
    assert engine.scheduler.has_unfinished
    engine.run()
    assert engine.tokens("a") == [0]
    engine.check_done()


def test_a_pipeline_shares_its_decodes_out() -> None:
    engine = Engine(Shape(max_in_flight=3, pipeline=True))
    engine.add(*(make_request(f"r{n}", [1, n], 20, ignore_eos=True) for n in range(7)))
    for _ in range(4):
        engine.turn()
    while len(engine.in_flight) < 3:
        assert engine.submit()
    assert sorted(len(plan.steps) for plan in engine.in_flight) == [1, 3, 3]
    assert all(step.token_id >= 0 for plan in engine.plans for step in plan.steps)
    engine.run()
    engine.check_done()


def test_a_pipeline_cuts_a_long_prompt_for_all_its_stages() -> None:
    """Into four parts for each stage, of what is left each time, and none that is tiny."""
    engine = Engine(
        Shape(num_blocks=1200, max_model_len=4800, max_num_batched_tokens=2000, max_in_flight=2, pipeline=True)
    )
    engine.add(make_request("a", long_prompt(4000), 2))
    engine.run()
    engine.check_done()
    parts = [plan.num_tokens for plan in engine.plans[:-1]]
    assert parts[:3] == [500, 438, 383]
    assert all(before >= after for before, after in pairwise(parts))
    assert min(parts[:-1]) == 128


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "most"), [(0, 0.07), (12, 0.08)])
def test_stages_of_a_pipeline_rarely_wait_for_each_other(spread: int, most: float) -> None:
    """64 requests at a time, each with 64 tokens of a prompt and 24 of an answer, more or less; as many follow. Both
    stages take a second for a token, in virtual time."""
    engine = Engine(
        Shape(
            num_blocks=4096,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            least_prefill_share=32,
            max_in_flight=2,
            pipeline=True,
        )
    )
    following, rng = iter(range(64, 128)), random.Random(0)

    def add(number: int) -> None:
        more, later = (rng.randint(-spread, spread) for _ in range(2))
        engine.add(make_request(str(number), [1, 1 + number, *long_prompt(62 + more)], 24 + later, ignore_eos=True))

    for number in range(64):
        add(number)
    free, busy, ends, now, finished = [0, 0], 0, deque[int](), 0, 0
    while engine.scheduler.has_unfinished:
        while (plan := engine.submit()) is not None:
            end, busy = now, busy + plan.num_tokens
            for stage in range(2):
                free[stage] = end = max(end, free[stage]) + plan.num_tokens
            ends.append(end)
        now = ends.popleft()
        engine.collect()
        while finished < sum(outputs[-1].finish_reason is not None for outputs in engine.outputs.values()):
            finished += 1
            if (follower := next(following, None)) is not None:
                add(follower)
    engine.check_done()
    bubble = 1 - busy / now
    assert bubble < most


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "empty"),
        (long_prompt(128), 4, "prompt has 128 tokens"),
        (long_prompt(60), 30, "lower max_tokens"),
    ],
)
def test_what_never_fits_is_an_error(prompt: list[int], max_tokens: int, message: str) -> None:
    engine = Engine(Shape(num_blocks=21))
    engine.add(make_request("a", prompt, max_tokens))
    assert engine.scheduler.has_unfinished
    engine.run()
    (output,) = engine.outputs["a"]
    assert (output.finish_reason, output.token_ids) == ("error", [])
    assert message in output.error


def test_what_just_fits_runs() -> None:
    engine = Engine(Shape(num_blocks=21))
    engine.add(make_request("a", long_prompt(60), 21, ignore_eos=True))
    engine.run()
    engine.check_done()
    assert len(engine.tokens("a")) == 21


def test_length_limits() -> None:
    engine = Engine(Shape(max_model_len=10))
    engine.add(make_request("a", long_prompt(7), 9, ignore_eos=True))
    engine.run()
    engine.check_done()
    assert (len(engine.tokens("a")), engine.finish_reason("a")) == (3, "length")


def test_min_tokens_outlasts_a_stop_token() -> None:
    prompt = next([1, n] for n in range(2000) if next_token([1, n], "") == 0)
    engine = Engine(Shape())
    engine.add(make_request("a", prompt, 9, min_tokens=3))
    engine.run()
    engine.check_done()
    assert len(engine.tokens("a")) >= 3


def test_tokens_after_a_stop_are_dropped_with_what_belongs_to_them() -> None:
    engine = Engine(Shape())
    engine.add(make_request("a", [1, 2], 9))
    plan = engine.scheduler.schedule()
    assert plan is not None
    result = SequenceResult(plan.steps[0].seq_id, [3, 0, 4], None, ["x", "y", "z"])
    (output,) = engine.scheduler.update(plan, StepResult(0, [result]))
    assert (output.token_ids, output.digests, output.finish_reason) == ([3, 0], ["x", "y"], "stop")
    assert output.stop_token_id == 0


def test_results_out_of_order_are_a_bug() -> None:
    engine = Engine(Shape(max_in_flight=2))
    engine.add(make_request("a", [1, 2], 9))
    engine.submit()
    second = engine.submit()
    assert second is not None
    with pytest.raises(AssertionError):
        engine.scheduler.update(second, StepResult(second.step_id, []))


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_abort_gives_everything_back(turns: int) -> None:
    engine = Engine(Shape(max_in_flight=2, max_num_seqs=2))
    engine.add(*(make_request(f"r{n}", long_prompt(30, n), 20, ignore_eos=True) for n in range(4)))
    for _ in range(turns):
        engine.turn()
    names = [f"r{n}" for n in range(4)]
    engine.scheduler.abort_requests(names)
    engine.scheduler.abort_requests([*names, "unknown"])
    engine.run()
    engine.check_done(set(names))
    assert [engine.finish_reason(name) for name in names] == ["abort"] * 4


def test_workers_forget_with_the_next_plan() -> None:
    engine = Engine(Shape())
    engine.add(make_request("a", [1, 2], 1))
    engine.run()
    assert set(engine.workers[0].sequences) == {0}
    engine.add(make_request("b", [1, 2], 1))
    engine.run()
    assert set(engine.workers[0].sequences) == {1}


def test_the_second_request_skips_the_prefix() -> None:
    engine = Engine(Shape())
    for name, cached in (("a", 0), ("b", 36)):
        engine.add(make_request(name, long_prompt(40), 3))
        engine.run()
        assert [output.num_cached_tokens for output in engine.outputs[name]][:1] == [cached]
    assert engine.plans[-1].steps[0].start >= 36
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens) == (80, 36, 80)
    engine.check_done()


def test_after_a_reset_a_prefix_is_computed_once_more() -> None:
    engine = Engine(Shape())
    for name, cached in (("a", 0), ("b", 36), ("c", 0), ("d", 36)):
        if name == "c":
            engine.scheduler.kv.reset_prefixes()
        engine.add(make_request(name, long_prompt(40), 3))
        engine.run()
        assert engine.outputs[name][0].num_cached_tokens == cached
    engine.check_done()


def test_generated_tokens_are_cached_too() -> None:
    engine = Engine(Shape())
    first = make_request("a", long_prompt(8), 12, ignore_eos=True)
    engine.add(first)
    engine.run()
    engine.add(make_request("b", long_prompt(8) + engine.tokens("a") + [1], 2))
    engine.run()
    assert engine.outputs["b"][0].num_cached_tokens == 16
    engine.check_done()


def test_requests_that_arrive_together_compute_a_common_prefix_once() -> None:
    engine = Engine(Shape(max_num_batched_tokens=64))
    engine.add(*(make_request(name, [*long_prompt(40), index], 3) for index, name in enumerate("abcd")))
    engine.submit()
    assert [step.num_tokens for step in engine.plans[0].steps] == [41, 1, 1, 1]
    engine.run()
    engine.check_done()


def test_a_prefix_in_flight_is_shared_with_its_plan_and_the_next() -> None:
    engine = Engine(Shape(max_in_flight=2, max_num_batched_tokens=41))
    engine.add(make_request("a", long_prompt(40), 3), make_request("b", long_prompt(40), 3))
    engine.submit()
    engine.submit()
    assert engine.plans[0].num_tokens == 41
    assert engine.plans[1].num_tokens == 1 + 3
    engine.run()
    engine.check_done()


def test_a_request_without_room_for_its_own_starts_on_what_another_computes() -> None:
    engine = Engine(Shape(num_blocks=21, max_num_batched_tokens=48))
    engine.add(*(make_request(name, long_prompt(41), 30, ignore_eos=True) for name in "ab"))
    engine.run()
    engine.check_done()
    second = next(plan for plan in engine.plans if any(start.seq_id == 1 for start in plan.starts))
    assert second.step_id == 0
    assert engine.outputs["b"][0].num_cached_tokens == 40


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_salts_share_nothing(prefix_caching: bool) -> None:
    engine = Engine(Shape(prefix_caching=prefix_caching))
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        engine.add(make_request(name, long_prompt(40), 3, cache_salt=salt))
        engine.run()
    cached = [engine.outputs[name][0].num_cached_tokens for name in "abc"]
    assert cached == ([0, 0, 36] if prefix_caching else [0, 0, 0])
    engine.check_done()


def test_a_window_holds_few_blocks() -> None:
    groups = (KVGroup((0,), None), KVGroup((1,), 9))
    engine = Engine(Shape(groups, max_num_batched_tokens=8))
    engine.add(make_request("a", long_prompt(80), 20, ignore_eos=True))
    most = 0

    def watch() -> None:
        nonlocal most
        sequences: list[LiveSequence] = engine.scheduler.queues.running
        held = [len(sequence.kv.tables[1]) - sequence.kv.num_slid[1] for sequence in sequences]
        most = max([most, *held])

    engine.run(before_turn=watch)
    engine.check_done()
    assert most <= 5


def test_a_hit_needs_only_the_window() -> None:
    groups = (KVGroup((0,), None), KVGroup((1,), 6))
    engine = Engine(Shape(groups))
    for name in "ab":
        engine.add(make_request(name, long_prompt(40), 3))
        engine.run()
    assert engine.outputs["b"][0].num_cached_tokens == 36
    start = next(step for plan in engine.plans for step in plan.steps if step.start == 36)
    assert [block != 0 for block in start.new_blocks[1]] == [False] * 7 + [True] * 3
    engine.check_done()


def overcommitted(max_in_flight: int = 1) -> Engine:
    """Three requests that need eight of twenty blocks each."""
    engine = Engine(Shape(num_blocks=21, prefix_caching=False, max_in_flight=max_in_flight))
    engine.add(*(make_request(f"r{n}", [1, n], 29, ignore_eos=True, arrival_time=float(n)) for n in range(3)))
    return engine


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_preemption_is_logged_counted_and_harmless(max_in_flight: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = overcommitted(max_in_flight)
    with caplog.at_level(logging.WARNING):
        engine.run()
    engine.check_done()
    assert 1 <= engine.scheduler.stats().num_preemptions <= 2
    (record,) = caplog.records[:1]
    for words in ("r2 was preempted because there is not enough KV cache space", "--kv-cache-memory", "--max-num-seqs"):
        assert words in record.getMessage()


def test_nobody_else_is_preempted_while_a_victim_still_drains() -> None:
    engine = Engine(Shape(num_blocks=4 * 8 + 3, prefix_caching=False, max_in_flight=3))
    engine.add(*(make_request(f"r{n}", [1, n], 15, ignore_eos=True) for n in range(10)))
    engine.run()
    engine.check_done()
    assert 1 <= engine.scheduler.stats().num_preemptions <= 3


def test_a_preempted_sequence_restarts_with_all_its_tokens() -> None:
    engine = overcommitted()
    engine.run()
    starts = [start for plan in engine.plans for start in plan.starts]
    again = starts[3]
    assert again.seq_id == 3
    assert again.num_prompt_tokens == 2
    expected, _ = reference(engine.requests["r2"], 128)
    assert again.token_ids == [1, 2, *expected[: len(again.token_ids) - 2]]
    assert len(again.token_ids) > 10


def test_less_important_classes_give_way_first() -> None:
    engine = Engine(Shape(num_blocks=21, prefix_caching=False))
    for name, priority in (("a", 1), ("b", 0), ("c", 0)):
        engine.add(make_request(name, [1, ord(name)], 29, ignore_eos=True, priority=priority))
    engine.run()
    engine.check_done()
    restarted = [start.token_ids[1] for plan in engine.plans for start in plan.starts if start.seq_id >= 3]
    assert set(restarted) == {ord("a")}


def test_cheapest_victim() -> None:
    engine = Engine(Shape())
    for number, priority in enumerate((0, 0, 0, 0, 1, 1)):
        engine.add(make_request(f"r{number}", [1, number], priority=priority))
    running = engine.scheduler.registry.find_sequences(f"r{number}" for number in range(6))
    costs = dict(zip(running, (1, 20, 30, 20, 7, 9), strict=True))

    def victim(count: int, needy: int) -> int | None:
        chosen = cheapest_victim(running[:count], running[needy], costs.__getitem__)
        return None if chosen is None else running.index(chosen)

    assert victim(6, 0) == 4, "the least important class, there the cheapest"
    assert victim(6, 5) == 4
    assert victim(4, 2) == 3, "the latest of the cheapest"
    assert victim(3, 1) == 1, "itself"
    assert victim(1, 0) is None, "the first gives way to nobody"
    assert victim(5, 4) == 4, "no more important class gives way"


def test_the_log_is_not_flooded(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 1.0, 2.0, 11.0))
    log = PreemptionLog(lambda: next(times))
    engine = Engine(Shape())
    engine.add(make_request("a", [1]))
    sequence = engine.scheduler.queues.waiting.peek()
    assert sequence is not None
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            log.record(sequence, 5)
    assert len(caplog.records) == 2
    assert "3 preemption(s) since the last such line, up to 15 tokens" in caplog.records[1].getMessage()


def test_stats_while_running() -> None:
    engine = Engine(Shape(max_num_seqs=2))
    engine.add(*(make_request(f"r{n}", [1, n, 2], 4, ignore_eos=True) for n in range(3)))
    engine.turn()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert (stats.kv_blocks_total, stats.kv_blocks_used) == (64, 2)
    assert (stats.num_steps, stats.prompt_tokens, stats.generation_tokens) == (1, 6, 2)
    assert stats.step_seconds == pytest.approx(0.001)


def test_two_sequences_never_chase_each_other_away() -> None:
    engine = Engine(Shape(num_blocks=18, prefix_caching=False, max_model_len=60))
    engine.add(*(make_request(f"r{n}", [1, n], 58, ignore_eos=True) for n in range(6)))
    engine.run(max_turns=6 * 60 * 2)
    engine.check_done()
    computed = engine.workers[0].num_computed_tokens
    assert computed < 2 * 6 * 60, "most of the work was done twice"


def test_a_pipeline_leaves_no_sequence_out() -> None:
    engine = Engine(Shape(max_in_flight=3, pipeline=True))
    engine.add(*(make_request(f"r{n}", [1, n], 20, ignore_eos=True) for n in range(7)))
    for _ in range(10):
        engine.submit()
        engine.collect()
    lengths = [len(engine.tokens(name)) for name in engine.requests]
    assert max(lengths) - min(lengths) <= 2
    engine.run()
    engine.check_done()


def test_a_newcomer_leaves_running_prompts_their_blocks() -> None:
    engine = Engine(Shape(num_blocks=26, max_num_batched_tokens=24, prefix_caching=False))
    engine.add(make_request("a", long_prompt(60), 1), make_request("b", long_prompt(41), 1))
    engine.run()
    engine.check_done()
    assert engine.scheduler.stats().num_preemptions == 0
    assert engine.workers[0].num_computed_tokens == 101


def test_a_newcomer_leaves_running_sequences_room_to_grow() -> None:
    engine = Engine(Shape(num_blocks=11, prefix_caching=False))
    engine.add(make_request("a", long_prompt(20), 4, ignore_eos=True), make_request("b", long_prompt(20), 1))
    plan = engine.submit()
    assert shares(plan) == [(0, 0, 20)]
    engine.run()
    engine.check_done()
    assert engine.scheduler.stats().num_preemptions == 0


def test_a_long_prompt_leaves_room_for_short_ones() -> None:
    engine = Engine(Shape(max_num_batched_tokens=32, max_prefill_tokens=8))
    engine.add(make_request("long", long_prompt(30), 2), make_request("short", [1, 2, 3], 2, ignore_eos=True))
    first = shares(engine.submit())
    engine.collect()
    second = shares(engine.submit())
    engine.collect()
    assert first == [(0, 0, 8), (1, 0, 3)]
    assert second == [(1, 3, 1), (0, 8, 8)]
    engine.run()
    engine.check_done()


def test_prompts_in_parts_keep_the_room_of_their_rest() -> None:
    blocks = Shape(block_size=4, num_blocks=14, max_num_batched_tokens=32, max_prefill_tokens=4)
    engine = Engine(blocks)
    engine.add(make_request("a", long_prompt(40), 2), make_request("b", long_prompt(40, 2), 2))
    assert shares(engine.submit()) == [(0, 0, 4)], "the rest of the first prompt has the blocks"
    engine.collect()
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0
    engine.check_done()
