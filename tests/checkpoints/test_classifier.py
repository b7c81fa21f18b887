"""The labels of a config.json."""

from __future__ import annotations

from typing import Any

import pytest

from shardline.checkpoints.classifier import LabelConfig, read_labels

CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"]}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, LabelConfig(("LABEL_0", "LABEL_1"), "softmax")),
        ({"num_labels": 1}, LabelConfig(("LABEL_0",), "sigmoid")),
        ({"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, LabelConfig(("no", "maybe", "yes"), "softmax")),
        ({"id2label": {"0": "LABEL_0"}, "problem_type": "regression"}, LabelConfig(("LABEL_0",), "none")),
        ({"problem_type": "multi_label_classification"}, LabelConfig(("LABEL_0", "LABEL_1"), "sigmoid")),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            LabelConfig(("LABEL_0",), "none"),
        ),
    ],
)
def test_labels(keys: dict[str, Any], expected: LabelConfig) -> None:
    assert read_labels({**CLASSIFIER, **keys}) == expected


@pytest.mark.parametrize("config", [{}, {"architectures": None}, {"architectures": ["Qwen3ForCausalLM"]}])
def test_other_models_have_none(config: dict[str, Any]) -> None:
    assert read_labels(config) is None


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"problem_type": "guessing"}, "problem_type"),
        ({"id2label": ["a"]}, "id2label"),
        ({"num_labels": 0}, "num_labels"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}, "Tanh"),
    ],
)
def test_refusals(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_labels({**CLASSIFIER, **keys})
