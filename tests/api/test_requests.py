"""Which requests are refused, and what the engine gets for the others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from shardline.api.errors import ContextLengthExceeded
from shardline.api.requests import RequestBuilder
from shardline.config.engine import EngineConfig
from shardline.sampling_params import SamplingParams
from tests.api.fake_engine import load_text

TEXT = load_text(EngineConfig())


def builder(**changes: Any) -> RequestBuilder:
    options: dict[str, Any] = {
        "tokenizer": TEXT.tokenizer,
        "vocab_size": 400,
        "max_model_len": 10,
        "eos_token_ids": (1,),
        "seeds": random.Random(0),
        **changes,
    }
    return RequestBuilder(**options)


def test_what_the_engine_gets_can_be_sent_and_holds_no_stop_strings() -> None:
    params = SamplingParams(top_k=10**30, stop=["a", "b"], stop_token_ids=[3] * 1000 + [2])
    request = builder().build_request("r", [5], params)
    [child] = request.children
    assert request.params.stop_strings == ("a", "b")
    assert child.sampling.stop_strings == ()
    assert child.sampling.top_k == 0
    assert list(child.sampling.stop_token_ids) == [3, 2]


@pytest.mark.parametrize(
    ("params", "options", "says"),
    [
        (SamplingParams(max_tokens=2.5), {}, "max_tokens"),  # type: ignore[arg-type]
        (SamplingParams(ignore_eos="yes"), {}, "ignore_eos"),  # type: ignore[arg-type]
        (SamplingParams(stop=["s"] * 2000), {}, "at most 1024 strings"),
        (SamplingParams(stop="s" * 70_000), {}, "65536 characters"),
        (SamplingParams(), {"priority": 2**63}, "priority"),
        (SamplingParams(), {"cache_salt": "s" * 2000}, "cache_salt"),
    ],
)
def test_what_could_not_be_sent_is_refused(params: SamplingParams, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        builder().build_request("r", [5], params, **options)


@pytest.mark.parametrize(
    ("has_key", "asked", "marked"), [(True, None, True), (True, True, True), (True, False, None), (False, False, None)]
)
def test_outputs_are_marked_if_there_is_a_key(has_key: bool, asked: bool | None, marked: bool | None) -> None:
    request = builder(has_watermark=has_key).build_request("r", [5], SamplingParams(watermarking=asked))
    assert [child.sampling.watermarking for child in request.children] == [marked]


def test_a_mark_without_a_key_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"watermarking \(or watermark\) .* no key .* leave it out, or .* --watermark-config"
    ):
        builder().build_request("r", [5], SamplingParams(watermarking=True))


def test_a_prompt_that_is_too_long_is_an_error_of_its_own() -> None:
    with pytest.raises(ContextLengthExceeded, match="10 tokens"):
        builder().build_request("r", [5] * 10, SamplingParams())


def test_children_share_all_but_the_choice() -> None:
    request = builder().build_request("r", [5, 6, 7], SamplingParams(n=3), priority=2, cache_salt="s")
    assert [child.request_id for child in request.children] == ["r-0", "r-1", "r-2"]
    assert [child.choice for child in request.children] == [0, 1, 2]
    assert len({child.sampling.seed for child in request.children}) == 1
    for child in request.children:
        assert child.prompt_token_ids == [5, 6, 7]
        assert (child.priority, child.cache_salt, child.eos_token_ids) == (2, "s", (1,))


def test_seeds_are_drawn_only_where_none_is_given_and_follow_the_engines() -> None:
    seeds = [builder().build_request("r", [5], SamplingParams(seed=seed)).params.seed for seed in (None, 3, 0)]
    assert seeds[1:] == [3, 0]
    one, other = builder(), builder()
    drawn = [one.build_request("r", [5], SamplingParams()).params.seed for _ in range(3)]
    assert len(set(drawn)) == 3
    assert drawn == [other.build_request("r", [5], SamplingParams()).params.seed for _ in range(3)]


@pytest.mark.parametrize(("asked", "given"), [(None, 7), (100, 7), (7, 7), (3, 3)])
def test_max_tokens_is_what_the_model_has_room_for(asked: int | None, given: int) -> None:
    assert builder().build_request("r", [5, 6, 7], SamplingParams(max_tokens=asked)).params.max_tokens == given


@pytest.mark.parametrize(
    ("prompt", "text", "count"),
    [
        ("dog", "dog", None),
        ({"prompt": "dog"}, "dog", None),
        ({"prompt_token_ids": [5, 6]}, None, 2),
        ({"prompt_token_ids": (5, 6), "prompt": "shown"}, "shown", 2),
        ([5, 6], None, 2),
    ],
)
def test_forms_of_prompts(prompt: Any, text: str | None, count: int | None) -> None:
    request = builder().build_request("r", prompt, SamplingParams())
    assert request.prompt == text
    assert request.prompt_token_ids == ([5, 6] if count else TEXT.tokenizer and TEXT.tokenizer.encode_text("dog"))


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        ([5] * 10, {}, "has 10 tokens, but the model's maximum context length is 10"),
        ([400], {}, "token id 400 is out of vocabulary: it has 400"),
        ([5, -1], {}, "token id -1 is out of vocabulary"),
        ([5], {"stop_token_ids": [400]}, "stop_token_ids has token id 400"),
        ([5], {"logit_bias": {-1: 1.0}}, "logit_bias has token id -1"),
        ([5, 5], {"min_tokens": 9, "max_tokens": None}, "min_tokens is 9, but a prompt of 2 tokens leaves room for 8"),
        ([5], {"n": 10**6}, "n must be at most 1024"),
        ([5], {"logprobs": 21}, "logprobs must be in .0, 20., got 21, which is greater than max allowed: 20"),
        ([5], {"prompt_logprobs": -1}, "prompt_logprobs must be in .0, 20., got 400"),
        ([5], {"logprob_token_ids": [400]}, "logprob_token_ids has token id 400"),
        ([5], {"logprob_token_ids": []}, "must have 1 to 128 token ids"),
        ([5], {"logprob_token_ids": [1, 2], "logprobs": 1}, "they are 1 and 2"),
        ([5, "x"], {}, "must be a list of integers; one is str"),
        ([True], {}, "must be a list of integers"),
        ([5, np.int64(6)], {}, r"one is numpy.int64: give its .tolist\(\)"),
        ({"prompt_token_ids": "dog"}, {}, "must be a list of integers; got str"),
        (
            {"prompt_token_ids": np.array([5])},
            {},
            r"must be a list of integers; got numpy.ndarray: give its .tolist\(\)",
        ),
        ({"prompts": "dog"}, {}, "a prompt is text, .*; got an object with 'prompts'"),
        ({}, {}, "a prompt is text, .*; got an object with nothing"),
        ({"prompt": 5}, {}, "the text of a prompt must be text; got int"),
        (3, {}, "a prompt is text, .*; got int"),
        (np.array([5]), {}, r"a prompt is text, .*; got numpy.ndarray: give its .tolist\(\)"),
    ],
)
def test_what_is_refused(prompt: Any, params: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        builder().build_request("r", prompt, SamplingParams(**params))


def test_numbers_of_logprobs_are_resolved_for_the_engine() -> None:
    every = builder(max_logprobs=-1)
    [child] = every.build_request("r", [5], SamplingParams(logprobs=-1, prompt_logprobs=50)).children
    assert (child.sampling.logprobs, child.sampling.prompt_logprobs) == (400, 50)
    [child] = every.build_request("r", [5], SamplingParams(logprob_token_ids=[7, 8])).children
    assert (child.sampling.logprobs, child.sampling.logprob_token_ids) == (0, [7, 8])
    long = builder(max_logprobs=-1, vocab_size=200_000, max_model_len=1000)
    long.build_request("r", [5], SamplingParams(logprobs=-1, max_tokens=50))
    with pytest.raises(ValueError, match="ask for 11800000 log probabilities"):
        long.build_request("r", [5] * 9, SamplingParams(logprobs=-1, prompt_logprobs=-1, max_tokens=50))


def test_prompts_may_be_tensors() -> None:
    takes = builder(embeds_size=3, takes_embeds=True)
    for value in (torch.ones(2, 3, dtype=torch.bfloat16), np.ones((1, 2, 3), np.float32)):
        request = takes.build_request("r", {"prompt_embeds": value}, SamplingParams())
        [child] = request.children
        assert child.embeds is not None
        assert np.frombuffer(child.embeds.rows, np.float32).tolist() == [1.0] * 6
        assert (child.embeds.places, request.prompt_token_ids) == ([(0, 2)], [0, 0])
    for prompt, says in (
        ({"prompt_embeds": torch.ones(2, 4)}, "the shape"),
        ({"prompt_embeds": torch.ones(2, 3, dtype=torch.int32)}, "floating-point numbers"),
        ({"prompt_embeds": torch.ones(2, 3), "prompt_token_ids": [5]}, "cannot have 'prompt_token_ids' too"),
    ):
        with pytest.raises(ValueError, match=says):
            takes.build_request("r", prompt, SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--enable-prompt-embeds"):
        builder(embeds_size=3).build_request("r", {"prompt_embeds": torch.ones(2, 3)}, SamplingParams())
    with pytest.raises(ValueError, match="takes no prompt_embeds"):
        builder(takes_embeds=True).build_request("r", {"prompt_embeds": torch.ones(2, 3)}, SamplingParams())


def test_without_a_tokenizer_only_ids_work() -> None:
    mute = builder(tokenizer=None)
    assert mute.build_request("r", [5], SamplingParams()).prompt_token_ids == [5]
    with pytest.raises(ValueError, match="no tokenizer"):
        mute.build_request("r", "dog", SamplingParams())
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        mute.build_request("r", [5], SamplingParams(stop=["x"]))
