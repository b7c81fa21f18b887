"""Whatever the scheduler does, every request gets the tokens it would get alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardline.config.speculation import NO_SPECULATION, DraftModel, Speculation, Suffixes
from shardline.engine.speculative.payoff import Gate
from shardline.messages.request import Request
from shardline.models.kv_blocks import blocks_per_request
from shardline.models.kv_groups import KVGroup
from tests.engine.fake_worker import VOCAB, make_request
from tests.engine.harness import Engine, Shape

GROUPS = (
    (KVGroup((0,), None),),
    (KVGroup((0,), None), KVGroup((1,), 6)),
    (KVGroup((0,), None), KVGroup((1,), 5), KVGroup((2,), 9), KVGroup((3,), 1)),
    (KVGroup((0,), 7),),
    (KVGroup((0,), None), KVGroup((1,), None)),
)


SPECULATIONS = (
    st.builds(
        lambda most, shortest, more: Speculation(most, shortest, shortest + more),
        st.integers(1, 6),
        st.integers(1, 2),
        st.integers(0, 2),
    )
    | st.builds(
        lambda most, depth, requests, share: Speculation(most, 0, 0, Suffixes(depth, requests, 2.0, 0.0, share)),
        st.integers(1, 6),
        st.integers(1, 8),
        st.integers(0, 4),
        st.booleans(),
    )
    | st.builds(lambda most: Speculation(most, 0, 0, draft=DraftModel("small")), st.integers(1, 6))
)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    groups = draw(st.sampled_from(GROUPS))
    block_size, length = draw(st.sampled_from([1, 2, 4])), draw(st.integers(16, 48))
    return Shape(
        groups=groups,
        num_blocks=1 + blocks_per_request(groups, length, block_size, 1) + draw(st.integers(-2, 20)),
        block_size=block_size,
        max_model_len=length,
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.integers(1, 24)),
        max_prefill_tokens=draw(st.sampled_from([0, 0, 1, 5])),
        max_in_flight=draw(st.integers(1, 4)),
        pipeline=draw(st.booleans()),
        prefix_caching=draw(st.booleans()),
        least_prefill_share=draw(st.sampled_from([3, 128])),
        speculation=draw(st.just(NO_SPECULATION) | SPECULATIONS),
        tier_slots=draw(st.sampled_from([0, 0, 1, 3, 40])),
        tier_files=draw(st.booleans()),
        most_fetches=draw(st.sampled_from([1, 2, 9])),
    )


def random_request(rng: random.Random, number: int, now: int) -> Request:
    shared = [1, 2, 3, 4, 1, 1, 2, 2, 3, 3, 4, 4, 1, 2, 1, 2, 3, 1]
    prompt = shared[: rng.randrange(len(shared))] + [rng.randrange(VOCAB) for _ in range(rng.randrange(8))]
    max_tokens = rng.choice([1, 2, 5, 12, 30])
    return make_request(
        f"r{number}",
        prompt or [1],
        max_tokens,
        min_tokens=rng.choice([0, 0, 1, max_tokens]),
        ignore_eos=rng.random() < 0.6,
        stop_token_ids=rng.choice([(), (), (3,)]),
        priority=rng.choice([0, 0, 0, 1, -1]),
        arrival_time=float(now),
        cache_salt=rng.choice(["", "", "", "salty"]),
    )


def growing_request(rng: random.Random, number: int, now: int) -> Request:
    """A short prompt and a long output: what overcommits the pool."""
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
    priority = rng.choice([0, 0, 1])
    return make_request(f"r{number}", prompt, 33, ignore_eos=True, priority=priority, arrival_time=float(now))


def drive(
    shape: Shape,
    rng: random.Random,
    num_requests: int,
    abort_rate: float,
    new_request: Callable[[random.Random, int, int], Request] = random_request,
    loss_rate: float = 0.1,
) -> Engine:
    """Random arrivals and aborts between random submissions and collections, until all is done."""
    engine, aborted, number, turns = Engine(shape, lambda: rng.random() < loss_rate), set[str](), 0, 0
    while number < num_requests or engine.scheduler.has_unfinished:
        while number < num_requests and rng.random() < 0.4:
            engine.add(new_request(rng, number, turns))
            number += 1
        if number and rng.random() < abort_rate:
            name = f"r{rng.randrange(number)}"
            aborted.add(name)
            engine.scheduler.abort_requests([name, "unknown"])
        if rng.random() < 0.5:
            engine.submit()
        elif engine.in_flight and rng.random() < 0.5:
            engine.collect()
        else:
            engine.turn() if engine.scheduler.has_unfinished else None
        turns += 1
        assert turns < 20_000, "no progress"
    engine.check_done(aborted)
    return engine


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(shapes(), st.integers(0, 2**32), st.integers(1, 14), st.sampled_from([0.0, 0.05, 0.2]), st.booleans())
def test_any_schedule_gives_the_reference(
    shape: Shape, seed: int, num_requests: int, abort_rate: float, growing: bool
) -> None:
    new_request = growing_request if growing else random_request
    drive(shape, random.Random(seed), num_requests, abort_rate, new_request)


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
@pytest.mark.parametrize("groups", GROUPS)
def test_tiny_pools(pipeline: bool, max_in_flight: int, groups: tuple[KVGroup, ...]) -> None:
    preemptions = 0
    for seed in range(6):
        shape = Shape(
            groups,
            num_blocks=2 + blocks_per_request(groups, 39, 4, 1),
            max_model_len=40,
            max_in_flight=max_in_flight,
            pipeline=pipeline,
            max_num_batched_tokens=16,
            least_prefill_share=3,
        )
        preemptions += drive(shape, random.Random(seed), 12, 0.02, growing_request).scheduler.stats().num_preemptions
    assert preemptions > 0


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("tokens_per_result", [2, 3])
def test_results_of_several_tokens(pipeline: bool, tokens_per_result: int) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        shape = Shape(
            rng.choice(GROUPS),
            num_blocks=rng.choice([31, 61, 201]),
            max_model_len=40,
            max_num_batched_tokens=rng.choice([4, 16]),
            pipeline=pipeline,
            max_in_flight=2 if pipeline else 1,
            tokens_per_result=tokens_per_result,
        )
        drive(shape, rng, 8, 0.05)


@pytest.mark.parametrize("pipeline", [False, True])
def test_drafts_are_accepted(pipeline: bool) -> None:
    """Each accepted token saves a step."""
    request = make_request("r", [1, 2, 3], 60, ignore_eos=True)
    steps = {}
    for speculation in (NO_SPECULATION, Speculation(5, 1, 3)):
        engine = Engine(Shape(max_in_flight=2, pipeline=pipeline, speculation=speculation))
        engine.add(request)
        engine.run()
        engine.check_done()
        steps[speculation] = len(engine.plans)
        drafts = engine.scheduler.stats().drafts
        assert (drafts is None) == (speculation is NO_SPECULATION)
        if drafts is not None:
            assert 60 - len(engine.plans) == drafts.num_accepted > 0
            assert drafts.num_tokens > drafts.num_accepted
            assert drafts.accepted == sorted(drafts.accepted, reverse=True)
    assert steps[NO_SPECULATION] == 60


@pytest.mark.parametrize("pipeline", [False, True])
def test_guesses_of_a_step_are_the_next_draft(pipeline: bool) -> None:
    speculation = Speculation(3, 0, 0, draft=DraftModel("small"))
    engine = Engine(Shape(max_in_flight=2, pipeline=pipeline, speculation=speculation))
    engine.add(*(make_request(f"r{number}", [1, 2, number], 60, ignore_eos=True) for number in range(3)))
    with patch.object(Gate, "is_open", True):  # whatever the steps take
        engine.run()
    engine.check_done()
    samples = [step for plan in engine.plans for step in plan.steps if step.sample]
    first = [step for step in samples if not step.decodes]
    assert len(first) == 3
    assert not any(step.num_guesses for step in first)
    drafts = engine.scheduler.stats().drafts
    assert drafts is not None
    assert len(samples) == 180 - drafts.num_accepted
    assert 0 < drafts.num_accepted < drafts.num_tokens == sum(len(step.draft_token_ids) for step in samples)
    timelines = [engine.outputs[name][-1].timeline for name in engine.requests]
    assert sum(one.num_guessing_steps for one in timelines if one) == drafts.num_drafts
    assert sum(one.num_guesses for one in timelines if one) == drafts.num_tokens
    assert sum(one.num_right_guesses for one in timelines if one) == drafts.num_accepted


def test_a_request_that_is_aborted_while_its_prefix_is_fetched_gives_all_back() -> None:
    """Few blocks come at a time, so some of a prefix have not begun to when the last request is aborted."""
    shape = Shape(num_blocks=19, block_size=1, max_model_len=18, max_num_seqs=1, tier_slots=3, most_fetches=1)
    for seed in range(300):
        drive(shape, random.Random(seed), 4, 0.2)
