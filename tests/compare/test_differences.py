from __future__ import annotations

import math

import pytest

from shardline.compare.answers import Answer, Token
from shardline.compare.differences import deviation, first_difference

Step = tuple[str, dict[str, float]]


def answer(*steps: Step) -> Answer:
    """An answer of (token, probabilities)."""
    tokens = [Token(text, math.log(top[text]), {t: math.log(p) for t, p in top.items()}) for text, top in steps]
    return Answer(tokens, text="".join(text for text, _ in steps))


THE: Step = ("The", {"The": 0.9, "A": 0.05})


def test_equal_answers() -> None:
    assert first_difference(answer(THE), answer(THE), greedy=True) is None
    assert deviation(answer(THE), answer(THE), 1) == 0.0


@pytest.mark.parametrize(
    ("a", "b", "greedy", "cause"),
    [
        ({"cat": 0.4, "dog": 0.4}, {"cat": 0.4, "dog": 0.4}, True, "tie"),
        ({"cat": 0.41, "dog": 0.40}, {"cat": 0.40, "dog": 0.41}, True, "rounding"),
        ({"cat": 0.6, "dog": 0.2}, {"cat": 0.6, "dog": 0.2}, False, "draw"),
        ({"cat": 0.6, "dog": 0.2}, {"cat": 0.2, "dog": 0.6}, True, "model"),
        ({"cat": 0.6}, {"dog": 0.6}, True, "model"),
        ({"cat": 0.6, "dog": 0.2}, {"cat": 0.6, "dog": 0.2}, True, "model"),  # one of them is not greedy
    ],
)
def test_causes(a: dict[str, float], b: dict[str, float], greedy: bool, cause: str) -> None:
    found = first_difference(answer(THE, ("cat", a)), answer(THE, ("dog", b)), greedy=greedy)
    assert found is not None
    assert (found.position, found.before, found.cause) == (1, "The", cause)
    assert (found.a.token, found.b.token) == ("cat", "dog")
    assert found.a.logprob == math.log(a["cat"])
    assert found.b.other_logprob == (math.log(b["cat"]) if "cat" in b else None)


def test_an_earlier_deviation_tells_of_another_model() -> None:
    other: Step = ("The", {"The": 0.5, "A": 0.4})
    tie = {"cat": 0.4, "dog": 0.4}
    found = first_difference(answer(THE, ("cat", tie)), answer(other, ("dog", tie)), greedy=True)
    assert found is not None
    assert found.cause == "model"


def test_the_end_of_an_answer() -> None:
    found = first_difference(answer(THE), answer(THE, ("cat", {"cat": 0.6})), greedy=True)
    assert found is not None
    assert (found.position, found.cause, found.a.token, found.b.token) == (1, "end", None, "cat")


def test_answers_without_log_probabilities_are_compared_by_their_text() -> None:
    plain = Answer([Token("The cat", None, {})], text="The cat")
    pieces = Answer([Token("The", None, {}), Token(" cow", None, {})], text="The cow")
    assert first_difference(plain, plain, greedy=True) is None
    assert deviation(plain, pieces, 1) is None
    found = first_difference(plain, pieces, greedy=True)
    assert found is not None
    assert (found.position, found.before, found.a.token, found.cause) == (5, "The c", "at", "unknown")
