"""What a config.json says of the labels of a model that classifies: `…ForSequenceClassification`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardline.models.hf_config import HFConfig

Activation = Literal["sigmoid", "softmax", "none"]

_ARCHITECTURE = "ForSequenceClassification"
_DEFAULT_LABELS = 2
"""Of transformers, which writes no other keys then."""
_MAX_LABELS = 1 << 20
_OF_PROBLEMS: Mapping[str, Activation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_OF_MODULES: Mapping[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


@dataclass(frozen=True)
class LabelConfig:
    """The labels, and what makes scores of their logits."""

    labels: tuple[str, ...]
    activation: Activation


def read_labels(config: Mapping[str, Any]) -> LabelConfig | None:
    """The labels in a parsed config.json; None: the model does not classify.

    Raises:
        ValueError: a key is wrong, or asks for something that is not supported.
    """
    hf = HFConfig(config)
    if not any(name.endswith(_ARCHITECTURE) for name in hf.names("architectures")):
        return None
    named = hf.section("id2label").values
    count = len(named) or hf.integer("num_labels", _DEFAULT_LABELS, maximum=_MAX_LABELS)
    labels = tuple(str(named.get(str(index), f"LABEL_{index}")) for index in range(count))
    return LabelConfig(labels, _activation(hf, count))


def _activation(hf: HFConfig, num_labels: int) -> Activation:
    """What sentence-transformers or transformers would apply: a sigmoid of one logit, the softmax of several."""
    if hf.has("problem_type"):
        hf.only("problem_type", *_OF_PROBLEMS)
        return _OF_PROBLEMS[hf.text("problem_type")]
    own = hf.section("sentence_transformers")
    for section, key in ((own, "activation_fn"), (hf, "sbert_ce_default_activation_function")):
        if section.has(key):
            module = section.text(key).rpartition(".")[2]
            if module not in _OF_MODULES:
                raise section.error(key, f"{module!r} is not supported; supported: {', '.join(_OF_MODULES)}")
            return _OF_MODULES[module]
    return "sigmoid" if num_labels == 1 else "softmax"
