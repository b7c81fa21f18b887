"""LLM.encode, embed, classify and score, and what becomes of a model's numbers."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from shardline import LLM, PoolingParams
from shardline.api.batch import BatchRunner
from shardline.api.model_text import ModelText
from shardline.api.outputs import CompletionOutput, RequestOutput
from shardline.api.pooling import Pooler, cosine
from shardline.api.requests import PreparedRequest
from shardline.checkpoints.classifier import LabelConfig
from shardline.config.engine import EngineConfig
from tests.api.fake_engine import load_text
from tests.api.test_llm import FakeCluster, make
from tests.models.checkpoints import make_classifier

Vector = Callable[[list[int]], list[float]]
TWO_LABELS = LabelConfig(("no", "yes"), "softmax")
ONE_LABEL = LabelConfig(("LABEL_0",), "sigmoid")


@pytest.fixture
def vectors(monkeypatch: pytest.MonkeyPatch) -> list[Vector]:
    """Set the only entry to a function from the token ids of a prompt to the numbers of each of its tokens."""
    chosen: list[Vector] = [lambda token_ids: [3.0, 4.0]]

    def answer(request: PreparedRequest) -> RequestOutput:
        token_ids = request.prompt_token_ids
        count = 1 if request.params.prompt_logprobs is None else len(token_ids)
        choice = CompletionOutput(
            index=0, finish_reason="stop", embedding=array("f", chosen[0](token_ids) * count).tobytes()
        )
        return RequestOutput(request_id=request.request_id, prompt=None, prompt_token_ids=token_ids, outputs=[choice])

    def run(runner: BatchRunner, requests: Sequence[PreparedRequest], on_finished: object) -> object:
        return list(map(answer, requests)), []

    monkeypatch.setattr(BatchRunner, "run", run)
    return chosen


def make_pooling(labels: LabelConfig | None = None) -> LLM:
    def load(config: EngineConfig) -> ModelText:
        return dataclasses.replace(load_text(config), pooler=Pooler(2, labels))

    config = EngineConfig.from_options(runner="pooling")
    return LLM.from_config(config, connect=FakeCluster(), load_text=load)


def test_embed(vectors: list[Vector]) -> None:
    with make_pooling() as llm:
        (output,) = llm.embed("ab", use_tqdm=False)
        assert output.outputs.embedding == pytest.approx([0.6, 0.8])
        assert output.outputs.hidden_size == 2
        assert output.finished
        assert llm.embed([5], dimensions=1, use_tqdm=False)[0].outputs.embedding == [1.0]
        plain = llm.embed([5], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        assert plain[0].outputs.embedding == [3.0, 4.0]
        with pytest.raises(ValueError, match=r"\[1, 2\]"):
            llm.embed([5], dimensions=3, use_tqdm=False)


def test_encode(vectors: list[Vector]) -> None:
    with make_pooling() as llm:
        (output,) = llm.encode([5, 6, 7], pooling_task="token_embed", use_tqdm=False)
        assert output.outputs.data.shape == (3, 2)
        np.testing.assert_allclose(output.outputs.data, [[0.6, 0.8]] * 3, rtol=1e-6)
        assert llm.encode([5], pooling_task="embed", use_tqdm=False)[0].outputs.data.shape == (2,)
        cut = llm.encode("abcdef", pooling_task="embed", tokenization_kwargs={"truncate_prompt_tokens": 2})
        assert len(cut[0].prompt_token_ids) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "pooling_task required"),
        ({"pooling_task": "classify"}, "Classification API"),
        ({"pooling_task": "score"}, "no pooling task 'score'; this model has embed and token_embed"),
        ({"pooling_task": "embed", "pooling_params": [PoolingParams()] * 2}, "1 prompts but 2 pooling_params"),
        ({"pooling_task": "embed", "pooling_params": PoolingParams(task="classify")}, "cannot overwrite"),
        ({"pooling_task": "embed", "tokenization_kwargs": {"padding": True}}, "'padding'"),
    ],
)
def test_refusals(options: dict[str, object], words: str, vectors: list[Vector]) -> None:
    with make_pooling() as llm, pytest.raises(ValueError, match=words):
        llm.encode("a", **options)  # type: ignore[arg-type]


def test_classify(vectors: list[Vector]) -> None:
    with make_pooling(TWO_LABELS) as llm:
        (output,) = llm.classify("a", use_tqdm=False)
        assert output.outputs.num_classes == 2
        assert output.outputs.probs == pytest.approx([1 / (1 + math.e), math.e / (1 + math.e)])
        with pytest.raises(ValueError, match="Embeddings API"):
            llm.embed("a")
        with pytest.raises(ValueError, match="num_labels == 1"):
            llm.score("a", "b")
        with pytest.raises(ValueError, match="use classify"):
            llm.generate("a")


def test_score_by_embeddings(vectors: list[Vector]) -> None:
    vectors[0] = lambda token_ids: [1.0, 0.0] if len(token_ids) == 1 else [1.0, 1.0]
    with make_pooling() as llm:
        scores = llm.score("a", ["b", "bc"], use_tqdm=False)
        assert [one.outputs.score for one in scores] == pytest.approx([1.0, 0.5**0.5])
        with pytest.raises(ValueError, match="1:1, 1:N or N:N"):
            llm.score(["a", "b"], ["c"])
        for pair, got in (
            ((1, 2), "int"),
            ((["a", None], "b"), "NoneType"),
            (("a", {"text": "b"}), "an object with 'text'"),
        ):
            with pytest.raises(ValueError, match=f"pairs are of texts: .*; got {got}"):
                llm.score(*pair)


def test_score_by_a_classifier(vectors: list[Vector]) -> None:
    vectors[0] = lambda token_ids: [math.log(len(token_ids))]
    with make_pooling(ONE_LABEL) as llm:
        scores = llm.score(["ab", "x"], ["c", "yz"], use_tqdm=False)
        assert [one.outputs.score for one in scores] == pytest.approx([3 / 4, 3 / 4])
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        assert scores[0].prompt_token_ids == tokenizer.encode("abc")
        template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
        (written,) = llm.score("a", "b", chat_template=template, use_tqdm=False)
        assert written.prompt_token_ids == tokenizer.encode("[query]a[document]b")


@pytest.mark.parametrize(
    ("activation", "expected"), [("none", [-2.0, 3.0]), ("sigmoid", [1 / (1 + math.e**2), 1 / (1 + math.e**-3)])]
)
def test_other_activations(activation: str, expected: list[float], vectors: list[Vector]) -> None:
    vectors[0] = lambda token_ids: [-2.0, 3.0]
    with make_pooling(LabelConfig(("a", "b"), activation)) as llm:  # type: ignore[arg-type]
        assert llm.classify([5], use_tqdm=False)[0].outputs.probs == pytest.approx(expected)


def test_a_vector_of_zeros() -> None:
    zeros, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    assert cosine(zeros, ones) == 0.0
    assert cosine(ones, ones) == pytest.approx(1.0)


def test_a_generating_model_does_not_pool() -> None:
    with make(FakeCluster()) as llm:
        for refused in (lambda: llm.encode("a", pooling_task="embed"), lambda: llm.score("a", "b")):
            with pytest.raises(ValueError, match="runner='pooling'"):
                refused()


@pytest.mark.usefixtures("forked_engines")
def test_a_classifier_needs_no_runner(tmp_path: Path) -> None:
    folder = make_classifier("qwen3", tmp_path, 3)
    prompts = [[5, 6, 7], [9] * 20]
    with LLM(str(folder), dtype="float32", max_model_len=64) as llm:
        found = [one.outputs.probs for one in llm.classify(prompts, use_tqdm=False)]
        every = llm.encode(prompts, pooling_task="token_classify", use_tqdm=False)
    assert [one.outputs.data.shape for one in every] == [(3, 3), (20, 3)]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        for prompt, probs, tokens in zip(prompts, found, every, strict=True):
            assert probs == pytest.approx(model(torch.tensor([prompt])).logits[0].softmax(-1).tolist(), rel=1e-4)
            np.testing.assert_array_equal(np.array(probs, np.float32), tokens.outputs.data[-1])
