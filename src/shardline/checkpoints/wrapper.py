"""Models of text and images: the configuration and the checkpoint keys of the language model in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")
_TEXT = "text_config"
_FROM_WRAPPER = ("quantization_config", "compression_config", "dtype", "torch_dtype")
"""Keys that may be outside of the text model's section. The section's own value is used if it has one."""
_TIED = "tie_word_embeddings"
_PREFIXES: Mapping[str, str] = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Beginnings of a language model's keys in a wrapper's checkpoint, and in the language model's own checkpoint."""
_HEADLESS = ("embed_tokens.", "layers.", "norm.")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the language model in `config`, which may be a wrapper, such as gemma3 or mistral3.

    A wrapper's tie_word_embeddings takes precedence over that of its text model, as in transformers.
    """
    inner = config.get(_TEXT)
    if not isinstance(inner, Mapping):
        return dict(config)
    outer = {key: config[key] for key in _FROM_WRAPPER if config.get(key) is not None}
    own = {key: value for key, value in inner.items() if value is not None or key not in _FROM_WRAPPER}
    # A wrapper that does not name the type of its text model is one of the oldest kind, whose text model has its name.
    text = {"model_type": config.get("model_type"), **outer, **own}
    if config.get(_TIED) is not None:
        text[_TIED] = config[_TIED]
    return text


def language_model_key(key: str) -> str:
    """The key that a tensor of a wrapper's language model has in a checkpoint of the language model alone.

    Other keys are returned unchanged.
    """
    for prefix, plain in _PREFIXES.items():
        if key.startswith(prefix):
            return plain + key.removeprefix(prefix)
    return key


def whole_model_keys(tensors: dict[str, T]) -> dict[str, T]:
    """The tensors under the keys of a model with an lm_head, if they are those that transformers saves of one without.

    Most models that embed are saved so. A head for drafts has such keys too, and `fc` besides.
    """
    is_headless = "embed_tokens.weight" in tensors and not any(key.startswith(("model.", "fc.")) for key in tensors)
    if not is_headless:
        return tensors
    return {f"model.{key}" if key.startswith(_HEADLESS) else key: entry for key, entry in tensors.items()}
