"""/v1/systemone: questions about a state, answered by the probabilities of one token each."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from shardline.api.outputs import CompletionOutput, RequestOutput
from shardline.messages.request import TokenLogprobs
from shardline.server.pooling.decisions import Question, QuestionFields
from tests.server.conftest import Running

CHOICE = {"type": "choice", "instructions": "Who?", "criteria": {"billing": None, "shipping": "of parcels"}}
TOO_MANY = {"type": "choice", "criteria": dict.fromkeys(map(str, range(27)))}
LEVELS = {"type": "score", "criteria": ["calm", "annoyed", "furious"]}
BODY = {"model": "demo", "state": {"text": "wörld"}, "questions": {"team": CHOICE, "tone": LEVELS}}


def test_decisions(http: httpx.Client, shared: Running) -> None:
    answer = http.post("/v1/systemone", json={**BODY, "instructions": "Be fair."}).json()
    assert answer["object"] == "structured_decision"
    assert list(answer["answers"]) == ["team", "tone"]
    half = {"billing": 0.5, "shipping": 0.5}  # the fake engine finds all labels equally likely
    team = answer["answers"]["team"]
    assert team == {"type": "choice", "choice": "billing", "probabilities": half, "confidence": math.exp(-0.5)}
    assert answer["answers"]["tone"]["score"] == pytest.approx(1.0)
    assert answer["diagnostics"]["team"] == {"label_mass": 2 * math.exp(-0.5), "argmax_is_label": False}
    asked = shared.engine.requests[-2:]
    assert answer["usage"] == {
        "input_tokens": sum(len(request.prompt_token_ids) for request in asked),
        "output_tokens": 2,
    }
    vocabulary = shared.engine.tokenizer.get_vocab()
    labels = [request.sampling.logprob_token_ids for request in asked]
    assert labels == [[vocabulary[label] for label in labels] for labels in ("AB", "012")]
    text = shared.engine.tokenizer.decode(asked[0].prompt_token_ids, skip_special_tokens=False)
    question = "Question: Who?\nA: billing\nB: shipping - of parcels\nAnswer with the letter of one option only."
    assert f'Be fair.<|end|>\n<|user|>{{"text": "wörld"}}\n\n{question}<|end|>' in text


def _decide(fields: dict[str, Any], logprobs: list[float], token_id: int) -> tuple[dict[str, Any], Any]:
    question = Question.read("q", QuestionFields.model_validate(fields))
    ids = list(range(len(question.labels)))
    scores = TokenLogprobs(logprobs[0], 1, ids, logprobs, [1] * len(ids))
    choice = CompletionOutput(index=0, token_ids=[token_id], token_logprobs=[scores])
    return question.answer(ids, RequestOutput(request_id="r", prompt=None, prompt_token_ids=[], outputs=[choice]))


def test_what_probabilities_say() -> None:
    answer, diagnostics = _decide({"type": "noul", "criteria": {"false": "all is well"}}, [math.log(0.6), -100.0], 0)
    assert answer["noul"] == answer["probabilities"]["yes"] == pytest.approx(1.0)
    assert answer["confidence"] == diagnostics.label_mass == pytest.approx(0.6)
    assert diagnostics.argmax_is_label
    shares = [0.1, 0.1, 0.2]
    answer, diagnostics = _decide(LEVELS, [math.log(share) for share in shares], 99)
    assert answer["score"] == pytest.approx(1.25)
    assert answer["legend"] == {"0": "calm", "1": "annoyed", "2": "furious"}
    assert answer["probabilities"] == pytest.approx({"0": 0.25, "1": 0.25, "2": 0.5})
    assert answer["confidence"] == pytest.approx(0.2)
    assert not diagnostics.argmax_is_label


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"questions": {}}, "questions"),
        ({"questions": {str(name): CHOICE for name in range(65)}}, "at most 64"),
        ({"questions": {"q": {**CHOICE, "depends_on": ["x"]}}}, "unknown field(s)"),
        ({"questions": {"q": {"type": "essay"}}}, "choice, noul, score"),
        (
            {"questions": {"q": TOO_MANY}},
            "at most 26 options",
        ),
        ({"questions": {"q": {"type": "noul", "criteria": ["yes"]}}}, "must be an object"),
        ({"questions": {"q": {"type": "noul"}}}, "no token for 'yes'"),
        ({"questions": {"q": {"type": "score", "criteria": ["calm"]}}}, "ordered list of levels"),
        ({"questions": {"q": {"type": "score", "criteria": [1, "1"]}}}, "the same name"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "thinking must be off"),
        ({"images": ["data:,"]}, "takes text only"),
        ({"state": "a" * 9000}, "maximum context length"),
    ],
)
def test_refusals(http: httpx.Client, change: dict[str, object], word: str) -> None:
    answer = http.post("/v1/systemone", json={**BODY, **change})
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]
