"""Heads as the library `speculators` saves them: the configuration of their layers is a section of config.json. And the
signs of any head, which is no model alone."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from shardline.models.heads import LIBRARY_KIND as KIND
from shardline.models.hf_config import HFConfig

_LAYERS = "transformer_layer_config"
_KINDS = ("eagle", "eagle3")
_ARCHITECTURES = re.compile(r"\w+ForCausalLMEagle3?|Eagle\w*ForCausalLM")
"""Those that only heads have; some have that of a whole model."""
_PROJECTION, _LAYER_OF_EAGLE3 = "fc.weight", "midlayer."
"""Keys of tensors, or their beginnings, in heads that the library has not saved."""
_OUTSIDE = ("quantization_config", "dtype", "torch_dtype")
"""Keys that the whole configuration may have in place of the section."""
_UNSUPPORTED: Mapping[str, str] = {
    "layernorms": "an EAGLE head with norms around its layer (TTT)",
    "embed_requires_grad": "an embedding of its own",
}
_OF_HEADS = (
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
)


def flatten_head(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of such a head as `models.heads` reads it; any other one is returned as it is.

    Raises:
        ValueError: it is of a kind that is not supported, or its configuration is wrong.
    """
    if KIND not in config:
        return config
    hf = HFConfig(config)
    if (kind := hf.text(KIND)) not in _KINDS:
        raise hf.error(KIND, f"{kind!r} is a head that is not supported; supported: {', '.join(_KINDS)}")
    layers = hf.section(_LAYERS)
    for key, what in _UNSUPPORTED.items():
        if hf.flag(key, False):
            raise hf.error(key, f"is true, and {what} is not supported")
    model_type, size = layers.text("model_type"), layers.integer("hidden_size")
    if hf.has("target_hidden_size") and hf.integer("target_hidden_size") != size:
        raise hf.error("target_hidden_size", f"must be the hidden_size {size} of the head; others are not supported")
    own: dict[str, Any] = {key: config[key] for key in (KIND, *_OUTSIDE, *_OF_HEADS) if config.get(key) is not None}
    if kind == "eagle3":
        own |= {"draft_vocab_size": hf.integer("draft_vocab_size"), "norm_output": hf.flag("norm_output", False)}
    section = {key: value for key, value in layers.values.items() if value is not None or key not in _OUTSIDE}
    if kind == "eagle":
        section["num_hidden_layers"] = 1  # the section is often that of the model
    return {**own, **section, "model_type": model_type}


def check_whole(config: Mapping[str, Any], tensors: Collection[str] = ()) -> None:
    """Refuse a head in the place of a model. `tensors`: the keys of its checkpoint, if they are known.

    Raises:
        ValueError: it is one.
    """
    kind, sign = config.get(KIND), f"{KIND} of its config.json"
    names = config.get("architectures")
    named = next(filter(_ARCHITECTURES.fullmatch, map(str, names)), "") if isinstance(names, list) else ""
    if not kind and named:
        kind, sign = "eagle3" if "Eagle3" in named else "eagle", f"architectures {named} of its config.json"
    elif not kind and _PROJECTION in tensors:
        kind = "eagle3" if any(key.startswith(_LAYER_OF_EAGLE3) for key in tensors) else "eagle"
        sign = f"{_PROJECTION} of its checkpoint"
    if kind:
        asked = json.dumps({"method": kind, "model": "HEAD", "num_speculative_tokens": 4})
        raise ValueError(
            f"it is a head ({sign}) and no model alone; name it beside the model that it was trained for: "
            f"MODEL --speculative-config '{asked}'"
        )
