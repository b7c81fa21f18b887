"""Engine outputs become text and stop at stop strings, however many tokens a step brings."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.api.errors import QueueFull
from shardline.api.outputs import CompletionOutput
from shardline.api.requests import RequestBuilder
from shardline.api.streams import Streams
from shardline.config.engine import EngineConfig
from shardline.messages.request import SequenceOutput, TokenLogprobs
from shardline.messages.timeline import EngineTimeline
from shardline.sampling_params import SamplingParams
from tests.api.fake_engine import EOS, load_text

TEXT = load_text(EngineConfig())
TOKENIZER = TEXT.tokenizer
assert TOKENIZER is not None


def run(
    params: SamplingParams, ids: list[int], sizes: list[int] | None = None, **last: Any
) -> tuple[CompletionOutput, list[str]]:
    """The choice after steps of these sizes brought `ids`, and the aborts; `last`: how the engine ended the choice."""
    builder = RequestBuilder(TOKENIZER, 408, 1000, (EOS,), random.Random(0))
    replicas = Mock()
    streams = Streams(replicas, TOKENIZER)
    stream = streams.open(builder.build_request("r", "the dog", params))
    start = 0
    for size in [*(sizes or []), len(ids)]:
        piece = ids[start : start + size]
        start += size
        ending = last if start >= len(ids) else {}
        logprobs = [TokenLogprobs(-1.0, 1, [], []) for _ in piece]
        digests = [str(token) for token in piece]
        output = SequenceOutput("r-0", piece, logprobs=logprobs, digests=digests, **ending)
        streams.add_outputs([output])
        if start >= len(ids):
            break
    assert len(streams) == (0 if stream.output.finished else 1)
    return stream.output.outputs[0], _aborted(replicas)


def _aborted(replicas: Mock) -> list[str]:
    return [request_id for call in replicas.abort_requests.mock_calls for request_id in call.args[0]]


def test_an_output_that_cannot_be_decoded_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = RequestBuilder(TOKENIZER, 408, 1000, (EOS,), random.Random(0))
    replicas = Mock()
    streams = Streams(replicas, TOKENIZER)
    broken, sound = (streams.open(builder.build_request(name, "the dog", SamplingParams())) for name in "ab")
    monkeypatch.setattr(broken.choices[0], "_detokenizer", object())
    updated = streams.add_outputs([SequenceOutput("a-0", [1]), SequenceOutput("b-0", encode("cat"))])
    assert updated == [broken, sound]
    assert (_aborted(replicas), "a" in streams, "b" in streams) == (["a-0"], False, True)
    assert broken.output.outputs[0].finish_reason == "error"
    assert "AttributeError" in broken.output.outputs[0].error
    assert sound.output.outputs[0].text == "cat"


def encode(text: str) -> list[int]:
    assert TOKENIZER is not None
    return TOKENIZER.encode_text(text)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("the dogqu 🙂é.", min_size=1, max_size=30),
    stop=st.lists(st.text("tdo .🙂", min_size=1, max_size=3), max_size=2),
    sizes=st.lists(st.integers(1, 6), max_size=10),
    min_tokens=st.integers(0, 5),
)
def test_the_result_does_not_depend_on_the_steps(text: str, stop: list[str], sizes: list[int], min_tokens: int) -> None:
    params = SamplingParams(stop=stop, max_tokens=100, min_tokens=min_tokens, logprobs=0, logits_digest=True)
    ids = encode(text)
    whole, _ = run(params, ids, finish_reason="length")
    pieces, _ = run(params, ids, sizes, finish_reason="length")
    assert pieces == whole
    assert whole.logprobs is not None
    assert len(whole.logprobs) == len(whole.digests or []) == len(whole.token_ids)
    if whole.finish_reason == "length":
        assert whole.text == text
    else:
        assert whole.stop_reason in stop
        assert text.startswith(whole.text)


def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    ids = encode("one two. three")
    output, aborts = run(SamplingParams(stop=". t", max_tokens=100), ids, [1] * len(ids))
    assert (output.text, output.finish_reason, output.stop_reason) == ("one two", "stop", ". t")
    assert aborts == ["r-0"]
    assert encode("one two. three")[: len(output.token_ids)] == output.token_ids


def test_a_stop_string_in_the_last_step_needs_no_abort() -> None:
    output, aborts = run(SamplingParams(stop="o.", max_tokens=100), encode("two."), finish_reason="length")
    assert (output.text, output.finish_reason, output.stop_reason, aborts) == ("tw", "stop", "o.", [])


def test_text_held_back_comes_at_the_end() -> None:
    output, _ = run(SamplingParams(stop="two...", max_tokens=100), encode("one two."), finish_reason="length")
    assert (output.text, output.finish_reason) == ("one two.", "length")


def test_stop_strings_wait_for_min_tokens() -> None:
    ids = encode("qqqqq")
    assert len(ids) == 5
    assert run(SamplingParams(stop="q", min_tokens=3, max_tokens=100), ids)[0].text == "qqq"


@pytest.mark.parametrize(
    ("params", "token", "text", "reason"),
    [
        ({}, EOS, "dog", None),
        ({"skip_special_tokens": False}, EOS, "dog", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, EOS, "dog<|eos|>", None),
        ({"stop_token_ids": [9]}, 9, "dog", 9),
        ({"stop_token_ids": [9], "include_stop_str_in_output": True}, 9, "dog%", 9),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, EOS, "dog", EOS),
    ],
)
def test_stop_tokens(params: dict[str, Any], token: int, text: str, reason: int | None) -> None:
    assert TOKENIZER is not None
    assert TOKENIZER.decode([9]) == "%"
    ids = [*encode("dog"), token]
    output, _ = run(SamplingParams(**params), ids, finish_reason="stop", stop_token_id=token)
    assert output.token_ids == ids
    assert (output.text, output.finish_reason, output.stop_reason) == (text, "stop", reason)


def test_an_engines_error_is_told() -> None:
    output, _ = run(SamplingParams(), [], finish_reason="error", error="rank 3 was killed")
    assert (output.finish_reason, output.stop_reason, output.error) == ("error", None, "rank 3 was killed")


def test_choices_finish_apart_and_abort_ends_the_rest() -> None:
    builder = RequestBuilder(TOKENIZER, 408, 1000, (EOS,), random.Random(0))
    replicas = Mock()
    streams = Streams(replicas, TOKENIZER)
    stream = streams.open(builder.build_request("r", "the dog", SamplingParams(n=2)))
    output = stream.output
    updated = streams.add_outputs(
        [
            SequenceOutput("r-0", encode("dog"), finish_reason="length", num_cached_tokens=3),
            SequenceOutput("r-1", encode("do")),
            SequenceOutput("gone-0", [5]),
        ]
    )
    assert updated == [stream]
    assert not output.finished
    streams.abort("r")
    assert _aborted(replicas) == ["r-1"]
    assert [choice.finish_reason for choice in output.outputs] == ["length", "abort"]
    assert [choice.text for choice in output.outputs] == ["dog", "do"]
    assert output.num_cached_tokens == 3
    streams.abort("r")
    assert streams.add_outputs([SequenceOutput("r-1", [5])]) == []
    assert _aborted(replicas) == ["r-1"]


@pytest.mark.parametrize("error", [QueueFull("full"), KeyboardInterrupt()])
def test_a_request_that_cannot_be_handed_over_is_forgotten(error: BaseException) -> None:
    replicas = Mock()
    replicas.add_requests.side_effect = error
    streams = Streams(replicas, TOKENIZER)
    builder = RequestBuilder(TOKENIZER, 408, 1000, (EOS,), random.Random(0))
    with pytest.raises(type(error)):
        streams.open(builder.build_request("r", "the dog", SamplingParams(n=2)))
    assert len(streams) == 0
    assert _aborted(replicas) == ["r-0", "r-1"], "an interrupt may have come after they were sent"


def test_a_timeline_is_that_of_the_first_engine() -> None:
    builder = RequestBuilder(TOKENIZER, 408, 1000, (EOS,), random.Random(0))
    streams = Streams(Mock(), TOKENIZER)
    request = builder.build_request("r", "the dog", SamplingParams(max_tokens=9))
    stream = streams.open(request)
    child = request.children[0].request_id
    for number, timeline in enumerate([(0.5, 1.0), (0.1, 0.2)]):
        output = SequenceOutput(child, [number], timeline=EngineTimeline(*timeline), num_cached_tokens=number)
        streams.add_outputs([output])
    [choice] = stream.metrics().choices
    assert (choice.queued_seconds, choice.prefill_seconds, choice.num_cached_tokens) == (0.5, 0.5, 0)
