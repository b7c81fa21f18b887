"""Requests whose output is known from an earlier run: many tokens at once, and the end at the first that differs."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.config.speculation import Speculation
from shardline.messages.request import Constraints, Request
from shardline.models.kv_groups import KVGroup
from tests.engine.fake_worker import VOCAB, make_request, reference
from tests.engine.harness import Engine, Shape

SHAPES = [
    Shape(),
    Shape(max_in_flight=2),
    Shape(pipeline=True, max_in_flight=2),
    Shape(groups=(KVGroup((0,), None), KVGroup((1,), 8)), num_blocks=90, max_in_flight=2),
    Shape(num_blocks=40, max_num_seqs=3, max_num_batched_tokens=9),
    Shape(speculation=Speculation(3, 1, 2), max_in_flight=2),
]


def expected_from(request: Request, max_model_len: int, wrong: int | None) -> tuple[Request, list[int]]:
    """The request with its own output as the expected one, but for position `wrong`; and what it must get."""
    output, _ = reference(request, max_model_len)
    expected, found = list(output), output
    if wrong is not None and wrong < len(output):
        expected[wrong] = (expected[wrong] + 1) % VOCAB
        found = output[: wrong + 1]
    return msgspec.structs.replace(request, expected_token_ids=expected), found


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    wrongs=st.lists(st.none() | st.integers(0, 30), min_size=1, max_size=5),
    plain=st.booleans(),
)
def test_an_output_is_the_expected_one_up_to_the_first_token_that_differs(
    shape: Shape, wrongs: list[int | None], plain: bool
) -> None:
    engine = Engine(shape)
    must: dict[str, list[int]] = {}
    for number, wrong in enumerate(wrongs):
        request = make_request(f"r{number}", [number % VOCAB, 1, 2, 3, 4, 1], 30, ignore_eos=True)
        request, must[request.request_id] = expected_from(request, shape.max_model_len, wrong)
        engine.add(request)
    if plain:  # beside requests without expectations
        request = make_request("plain", [1, 2, 1, 2, 1, 2], 12)
        must["plain"], _ = reference(request, shape.max_model_len)
        engine.add(request)
    engine.run()
    assert {name: engine.tokens(name) for name in must} == must
    assert engine.scheduler.stats().kv_blocks_used == 0


def test_many_tokens_come_with_each_step() -> None:
    shape = Shape(max_num_seqs=12, max_num_batched_tokens=64)
    engine = Engine(shape)
    request, output = expected_from(make_request("r", [1, 2, 3], 60, ignore_eos=True), shape.max_model_len, None)
    engine.add(request)
    assert engine.run() == 1 + 5  # the prompt with a first token, then twelve rows a step
    assert engine.tokens("r") == output
    constrained = msgspec.structs.replace(request, request_id="c", constraints=Constraints(allowed_token_ids=(1, 2)))
    engine.add(constrained)
    assert engine.run() == 1 + 5, "constraints that are no grammar follow the guesses"


def test_an_output_that_goes_on_ends_behind_the_expected_one() -> None:
    engine = Engine(replace(SHAPES[0]))
    request, output = expected_from(make_request("r", [1, 2, 3], 20, ignore_eos=True), 128, None)
    engine.add(msgspec.structs.replace(request, expected_token_ids=output[:7]))
    engine.run()
    assert engine.tokens("r") == output[:8]
