from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import Running
from tests.server.fake_engine import REPLY
from tests.text.builders import byte_level_json, tokenizer

TOKENIZER = tokenizer(byte_level_json())
MODEL = "demo"
CHAT = {"role": "user", "content": "Hi"}


def test_best_of_ranks_the_choices(shared: Running, http: httpx.Client) -> None:
    body = {"prompt": "Hi", "n": 2, "best_of": 3, "max_tokens": 4}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert all(choice["logprobs"] is None for choice in choices)
    assert answer.json()["usage"]["completion_tokens"] == 12
    for change in ({"stream": True}, {"best_of": 1}):
        refused = http.post("/v1/completions", json={**body, **change})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "best_of"


def test_answers_a_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Hi there", max_tokens=100)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == MODEL
    assert answer.system_fingerprint == "sl-fake"
    assert answer.choices[0].text == REPLY
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == len(TOKENIZER.encode_text("Hi there"))
    assert usage.completion_tokens == len(TOKENIZER.encode_text(REPLY)) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_stops_after_16_tokens_by_default(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Hi", "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("n", [1, 3])
def test_stream_says_what_the_whole_answer_says(client: openai.OpenAI, n: int) -> None:
    texts = [""] * n
    reasons: list[str | None] = [None] * n
    for chunk in client.completions.create(model=MODEL, prompt="Hi", max_tokens=100, n=n, stream=True):
        assert chunk.object == "text_completion"
        assert chunk.usage is None
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        assert reasons[choice.index] is None
        reasons[choice.index] = choice.finish_reason
    assert texts == [REPLY, *(f"{k}{REPLY}" for k in range(1, n))]
    assert reasons == ["stop"] * n


def test_stream_ends_with_usage_where_asked_for(http: httpx.Client) -> None:
    body = {"prompt": "Hi", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    chunks = [httpx.Response(200, text=event).json() for event in events[:-1]]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_continuous_usage_counts_up(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(
        model=MODEL,
        prompt="Hi",
        max_tokens=5,
        stream=True,
        stream_options=options,  # type: ignore[arg-type]
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_no_chunk_has_a_usage_unless_the_last_one_has(http: httpx.Client) -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    for path, prompt in (("completions", {"prompt": "Hi"}), ("chat/completions", {"messages": [CHAT]})):
        answer = http.post(f"/v1/{path}", json={**prompt, "max_tokens": 2, "stream": True, "stream_options": options})
        assert answer.status_code == 200
        assert "usage" not in answer.text


def test_several_prompts_of_every_form(http: httpx.Client) -> None:
    for prompt in (["a", "b"], [[1, 2], [3]], ["a", "b"]):
        answer = http.post("/v1/completions", json={"prompt": prompt, "n": 2, "max_tokens": 3}).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    answer = http.post("/v1/completions", json={"prompt": [7, 8, 9], "max_tokens": 2}).json()
    assert answer["usage"]["prompt_tokens"] == 3


def test_several_prompts_stream(client: openai.OpenAI) -> None:
    texts = [""] * 4
    for chunk in client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=100, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [REPLY, "1" + REPLY] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Say it: ", TOKENIZER.encode_text("Say it: ")])
def test_echo_repeats_the_prompt(client: openai.OpenAI, prompt: str | list[int], stream: bool) -> None:
    answer: Any = client.completions.create(model=MODEL, prompt=prompt, echo=True, max_tokens=100, stream=stream)
    text = "".join(c.choices[0].text for c in answer) if stream else answer.choices[0].text
    assert text == "Say it: " + REPLY


@pytest.mark.parametrize("stream", [False, True])
def test_ids_stand_for_an_echoed_text(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {"echo": True, "logprobs": 1, "extra_body": {"return_token_ids": True}}
    answer: Any = client.completions.create(model=MODEL, prompt=[7, 8], max_tokens=100, stream=stream, **options)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == REPLY
    assert choices[0].prompt_token_ids == [7, 8]
    assert len([token for choice in choices for token in choice.logprobs.tokens]) > len(REPLY)


def test_stop_string_is_left_out_and_named(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 99, "stop": ["nope", "wör"]}).json()
    [choice] = answer["choices"]
    assert choice["text"] == "Hello, "
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "wör"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: openai.OpenAI, stream: bool) -> None:
    request = client.completions.create(model=MODEL, prompt="Hi", logprobs=4, max_tokens=100, stream=stream)
    answers: list[Any] = list(request) if stream else [request]
    tokens: list[str] = []
    offsets: list[int] = []
    top: list[dict[str, float]] = []
    values: list[float] = []
    for answer in answers:
        for choice in answer.choices:
            found = choice.logprobs
            assert found is not None
            tokens += found.tokens or []
            offsets += found.text_offset or []
            top += found.top_logprobs or []
            values += found.token_logprobs or []
    assert tokens[-1] == "<|eos|>"
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert offsets[-1] == len(REPLY)
    assert values == [-0.5] * len(tokens)
    assert all(token in entry for token, entry in zip(tokens, top, strict=True))
    assert min(min(entry.values()) for entry in top) == -9999.0
    whole = "".join(token for token in tokens[:-1] if not token.startswith("bytes:"))
    assert whole.startswith("Hello, w")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs_begins_with_the_prompt(client: openai.OpenAI, stream: bool, max_tokens: int) -> None:
    prompt = "Say it: Grüße 🙂"
    request = client.completions.create(
        model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, stream=stream
    )
    answers: list[Any] = list(request) if stream else [request]
    ids = TOKENIZER.encode_text(prompt)
    parts = [choice.logprobs for answer in answers for choice in answer.choices]
    values = [value for part in parts if part for value in part.token_logprobs or []]
    assert values == [None, *(-1.0 - index for index in range(len(ids) - 1)), *[-0.5] * max_tokens]
    tops = [top for part in parts if part for top in part.top_logprobs or []]
    assert tops[0] is None
    assert all(len(top) == 2 for top in tops[1 : len(ids)]), "the most likely token, and the prompt's own"
    offsets = [offset for part in parts if part for offset in part.text_offset or []]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert "".join(c.text for a in answers for c in a.choices).startswith(prompt)
    if not stream:
        assert answers[0].usage.completion_tokens == max_tokens
        assert answers[0].choices[0].finish_reason == "length"


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 5, "max_tokens": 0}])
def test_too_many_log_probabilities_of_prompts_are_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    answer = http.post("/v1/completions", json={"prompt": [[7] * 1900] * 60, **fields})
    assert answer.status_code == 400
    assert "at most 500000 are sent" in answer.json()["error"]["message"]


def test_prompt_logprobs(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": [5, 6, 7], "prompt_logprobs": 1, "max_tokens": 1, "n": 2})
    for choice in answer.json()["choices"]:
        first, second, third = choice["prompt_logprobs"]
        assert first is None
        assert second["6"] == {"logprob": -1.0, "rank": 2, "decoded_token": TOKENIZER.decode([6], False)}
        assert set(third) == {"7", "5"}
    chat = http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0}
    )
    assert chat.json()["prompt_logprobs"][0] is None


def test_a_prompt_that_is_too_long_has_openais_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="x" * 5000)
    assert (caught.value.code, caught.value.type, caught.value.param) == (
        "context_length_exceeded",
        "invalid_request_error",
        "prompt",
    )


def test_numbers_beyond_64_bits_harm_nobody(http: httpx.Client) -> None:
    huge = 10**30
    for field in ("priority", "seed", "min_tokens"):
        answer = http.post("/v1/completions", json={"prompt": "Hi", field: huge})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
    for field in ("top_k", "max_tokens"):
        assert http.post("/v1/completions", json={"prompt": "Hi", field: huge}).status_code == 200


def test_more_choices_than_can_ever_wait_are_no_429(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": ["Hi"] * 2048, "n": 2})
    assert answer.status_code == 400
    assert "4096 choices" in answer.json()["error"]["message"]


def test_extras_reach_the_engine(shared: Running, http: httpx.Client) -> None:
    body = {
        "prompt": "Hi", "max_tokens": 3, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 5, "priority": -2,
        "stop_token_ids": [3], "logit_bias": {"9": -1.5}, "cache_salt": "s", "skip_special_tokens": False,
        "return_token_ids": True, "logits_digest": True, "temperature": 0, "top_p": 0.5, "min_tokens": 1, "user": "me",
    }  # fmt: skip
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    request = shared.engine.requests[-1]
    assert request.priority == -2
    assert request.cache_salt == "s"
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.seed, sampling.top_p) == (7, 0.1, 5, 0.5)
    assert sampling.logit_bias == {9: -1.5}
    assert list(sampling.stop_token_ids) == [3]
    choice = answer.json()["choices"][0]
    assert choice["token_ids"] == TOKENIZER.encode_text(REPLY)[:3]
    assert choice["prompt_token_ids"] == TOKENIZER.encode_text("Hi")
    assert choice["logits_digests"] == ["d"] * 3


@pytest.mark.parametrize(
    ("change", "param", "part"),
    [
        ({"prompt": ""}, None, "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[1], []]}, None, "empty"),
        ({"prompt": ["a", 1]}, "prompt", "a string or an array of strings or an array of integers"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]", "expected an integer, but got a string"),
        ({"prompt": None}, "prompt", "a string"),
        ({"stop": ["a", 5]}, "stop[1]", "expected a string, but got an integer"),
        ({"stop": 5}, "stop", "expected a string or an array of strings"),
        ({"temperature": "x", "top_p": "y"}, "temperature", "expected a number, but got a string"),
        ({"stream": "maybe"}, "stream", "expected a boolean"),
        ({"prompt": {"a": 1}}, "prompt", "string"),
        ({"prompt": [999999]}, None, "out of vocabulary"),
        ({"prompt": "x" * 5000}, "prompt", "tokens"),
        ({"max_tokens": -1}, "max_tokens", "at least 1"),
        ({"max_tokens": "seven"}, "max_tokens", "integer"),
        ({"temperature": -1}, "temperature", "[0, 100]"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"n": 0}, "n", "greater than or equal to 1 (greater_than_equal)"),
        ({"n": 1000}, "n", "less than or equal to 128"),
        ({"logprobs": 21}, "logprobs", "[0, 20]"),
        ({"logprobs": -1}, "logprobs", "greater than max allowed: 20"),
        ({"logprobs": "some"}, "logprobs", "integer"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids", "'logprobs' must be set"),
        ({"logprob_token_ids": [10**6], "logprobs": 1}, "logprob_token_ids", "token id 1000000"),
        ({"logprob_token_ids": [5] * 129, "logprobs": 1}, "logprob_token_ids", "max allowed: 128"),
        (
            {"logprob_token_ids": [5], "logprobs": 1, "echo": True, "max_tokens": 0},
            "logprob_token_ids",
            "no output tokens are generated",
        ),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 1, "x": 1, "y": 1}}, "logit_bias", "'x', 'y'"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "[-100, 100]"),
        ({"stop": [""]}, "stop", "must not be empty"),
        ({"best_of": 1, "n": 2}, "best_of", "best_of"),
        ({"suffix": "x"}, "suffix", "suffix"),
        ({"use_beam_search": True, "echo": True, "logprobs": 1}, "use_beam_search", "not supported with beam search"),
        (
            {"use_beam_search": True, "logprobs": 1, "logprob_token_ids": [5]},
            "use_beam_search",
            "not supported with beam search",
        ),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "streamed"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "[0, 20]"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed when 'stream'"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "Unrecognized"),
        ({"frobnicate": 1}, "frobnicate", "Unrecognized request argument supplied: frobnicate"),
    ],
)  # fmt: skip
def test_refuses_with_a_reason(http: httpx.Client, change: dict[str, object], param: str | None, part: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Hi", **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert part in error["message"]


def test_missing_prompt_is_named(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"model": MODEL})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "Missing required parameter: 'prompt'."


def test_one_bad_prompt_refuses_the_whole_request_and_frees_the_rest(shared: Running, http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": [[1, 2], [10**6]], "ignore_eos": True, "max_tokens": 400})
    assert answer.status_code == 400
    assert shared.engine.num_running() == 0


def test_beam_search_answers_with_the_likeliest_outputs(http: httpx.Client) -> None:
    body = {"prompt": ["Hi", "Hi"], "n": 2, "max_tokens": 3, "temperature": 0, "use_beam_search": True, "logprobs": 1}
    answer = http.post("/v1/completions", json={**body, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    first, second, *others = answer.json()["choices"]
    assert [choice["index"] for choice in (first, second, *others)] == [0, 1, 2, 3]
    assert first["text"] != second["text"]
    assert [choice["text"] for choice in others] == [first["text"], second["text"]]
    assert sum(first["logprobs"]["token_logprobs"]) >= sum(second["logprobs"]["token_logprobs"])
    assert first["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 12
