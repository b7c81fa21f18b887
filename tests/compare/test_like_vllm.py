"""An endpoint whose streams have the details of vLLM's: pieces of several tokens, a first piece with a role only, ends
of answers among the tokens, and log probabilities of -9999 for what cannot come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from shardline.compare import Comparison, Endpoint, compare
from shardline.compare.answers import Options
from shardline.compare.report import text_lines
from tests.benchmark.stub_server import HEAD, LAST, Script, event, stub_server, whole

Top = dict[str, float]
"""Tokens with their probabilities; the first was chosen."""
HELLO: list[Top] = [{"Hel": 0.9, "Hi": 0.06}, {"lo": 0.8, "p": 0.0}, {" there": 0.41, " you": 0.4}]
END = {"<|im_end|>": 0.9, "!": 0.1}


def logarithm(probability: float) -> float:
    return math.log(probability) if probability else -9999.0


def completion_logprobs(tops: Sequence[Top]) -> dict[str, Any]:
    chosen = [next(iter(top.items())) for top in tops]
    return {
        "text_offset": [0] * len(tops),
        "tokens": [token for token, _ in chosen],
        "token_logprobs": [logarithm(probability) for _, probability in chosen],
        "top_logprobs": [{token: logarithm(p) for token, p in top.items()} for top in tops],
    }


def chat_logprobs(tops: Sequence[Top]) -> dict[str, Any]:
    listed = [
        [{"token": token, "logprob": logarithm(p), "bytes": list(token.encode())} for token, p in top.items()]
        for top in tops
    ]
    return {"content": [{**one[0], "top_logprobs": one} for one in listed]}


def stream_like_vllm(tops: list[Top], *, chat: bool, lists_end: bool, together: int = 1) -> Script:
    """The stream of an answer, `together` tokens a piece; with three, its end comes with the last ones."""
    usual = {"id": "x", "created": 1, "model": "m", "object": "chat.completion.chunk" if chat else "text_completion"}

    def piece(tokens: Sequence[Top], text: str, reason: str | None) -> bytes:
        found = (chat_logprobs if chat else completion_logprobs)(tokens) if tokens else None
        content: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": found, "finish_reason": reason, "stop_reason": None}
        return event({**usual, "choices": [{**choice, "token_ids": None}], "usage": None})

    pieces = [event({**usual, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})] * chat
    end = [END] if lists_end else []
    for start in range(0, len(tops), together):
        some = tops[start : start + together]
        text = "".join(next(iter(top)) for top in some)
        pieces.append(piece([*some, *end], text, "stop") if len(some) == 3 else piece(some, text, None))
    if together < 3:
        pieces.append(piece(end, "", "stop"))
    usage = event({**usual, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(tops) + 1}})
    return [(0.0, HEAD), *((0.001, one) for one in pieces), (0.0, usage + event("[DONE]") + LAST)]


def compared(a: list[Top], b: list[Top], *, chat: bool, together: int = 1, lists_end: bool = True) -> Comparison:
    def answering(tops: list[Top], together: int, lists_end: bool) -> Any:
        def answer(index: int, path: str, body: Any) -> Script:
            if path == "/v1/models":
                return [(0.0, whole({"object": "list", "data": [{"id": "m", "object": "model", "parent": None}]}))]
            assert path == ("/v1/chat/completions" if chat else "/v1/completions")
            assert (body["model"], body["stream"], body["seed"]) == ("m", True, 0)
            assert body["top_logprobs" if chat else "logprobs"] == 5
            return stream_like_vllm(tops, chat=chat, lists_end=lists_end, together=together)

        return answer

    with stub_server(answering(a, 1, True)) as one, stub_server(answering(b, together, lists_end)) as other:
        return compare(Endpoint(one.url), Endpoint(f"{other.url}/v1"), ["Hi", "Hi again"], Options(chat=chat))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("lists_end", [False, True])
@pytest.mark.parametrize("together", [2, 3])
def test_equal_answers_in_other_pieces(chat: bool, lists_end: bool, together: int) -> None:
    found = compared(HELLO, HELLO, chat=chat, together=together, lists_end=lists_end)
    assert found.equal
    for pair in found.pairs:
        assert pair.deviation == 0.0
        assert pair.a.text == pair.b.text == "Hello there"
        assert (
            [token.text for token in pair.a.tokens]
            == [token.text for token in pair.b.tokens]
            == [*map(next, map(iter, HELLO))]
        )
        assert pair.a.tokens[1].top == {"lo": math.log(0.8), "p": -9999.0}
        assert pair.a.ttft > 0


def test_a_cut_stream_is_no_answer_and_no_probability_is_claimed_where_none_came() -> None:
    def answering(text: str, reason: str | None) -> Any:
        piece = event({"choices": [{"index": 0, "text": text, "finish_reason": reason}]})
        models = [(0.0, whole({"data": [{"id": "m"}]}))]
        return lambda index, path, body: models if path == "/v1/models" else [(0.0, HEAD + piece + LAST)]

    with stub_server(answering("Hello", "stop")) as one, stub_server(answering("Help", "length")) as other:
        differ = compare(Endpoint(one.url), Endpoint(other.url), ["Hi"])
        with stub_server(answering("Hello", None)) as ends:
            cut = compare(Endpoint(one.url), Endpoint(ends.url), ["Hi"])
    assert "  A says 'lo'" in text_lines(differ)
    assert "likeliest" not in "".join(text_lines(differ))
    assert cut.pairs[0].error == "B: cut: the stream ended after 'Hello' without a finish_reason"


@pytest.mark.parametrize("chat", [False, True])
def test_what_differs_is_named(chat: bool) -> None:
    near = [*HELLO[:2], {" you": 0.41, " there": 0.4}, {"!": 0.9}]
    found = compared(HELLO, near, chat=chat)
    assert not found.equal
    assert [(pair.difference.position, pair.difference.cause) for pair in found.pairs if pair.difference] == [
        (2, "rounding")
    ] * 2
    longer = compared(HELLO, [*HELLO, {"!": 0.1, "<|im_end|>": 0.9}], chat=chat)
    assert [pair.difference.cause for pair in longer.pairs if pair.difference] == ["end"] * 2


def test_an_error_of_vllm_is_named() -> None:
    message = "This model's maximum context length is 8 tokens."
    error = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}

    def answer(index: int, path: str, body: Any) -> Script:
        if path == "/v1/models":
            return [(0.0, whole({"data": [{"id": "m"}]}))]
        return [(0.0, whole(error, "400 Bad Request"))]

    with stub_server(answer) as server:
        found = compare(Endpoint(server.url), Endpoint(server.url), ["Hi"])
    assert not found.equal
    assert "HTTP 400" in found.pairs[0].error
    assert message in found.pairs[0].error
