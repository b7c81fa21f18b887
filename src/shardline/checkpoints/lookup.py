"""Find the file for the `model_type` of a config.json: `families/<model_type>.py`."""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from msgspec.structs import replace

import shardline.models.families
from shardline.checkpoints.classifier import read_labels
from shardline.checkpoints.quantization import check_loadable
from shardline.checkpoints.wrapper import text_config
from shardline.models.heads import HEADS, HeadFamily, HeadLayout
from shardline.models.hf_config import HFConfig
from shardline.models.parts import AnyPart, Norm, Part
from shardline.models.spec import DecoderSpec, TensorSource

NORMS_HOLD_OFFSET = "norms_hold_offset"
"""Key of a configuration that was made from a GGUF file. True: see above."""


def without_norm_offsets(spec: DecoderSpec) -> DecoderSpec:
    """The model with norms that add nothing to their weights. Equal layers stay one object."""
    changed = {id(layer): _without_offsets(layer) for layer in spec.layers}
    layers = tuple(changed[id(layer)] for layer in spec.layers)
    return replace(spec, layers=layers, final_norm=_without_offsets(spec.final_norm))


def _without_offsets(part: AnyPart) -> AnyPart:
    """A norm, or a part of a model with all norms that are in it."""
    if isinstance(part, Norm):
        return replace(part, weight_offset=0.0)
    inner = {name: getattr(part, name) for name in part.__struct_fields__}
    changed = {name: _without_offsets(value) for name, value in inner.items() if isinstance(value, Part)}
    return replace(part, **{name: value for name, value in changed.items() if value != inner[name]})


_MAX_EXPERTS = 1 << 18
"""Experts of all layers. The largest models have a hundred thousand."""


class Family(Protocol):
    """The functions in the module of a model type."""

    def decoder_spec(self, hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
        """The model that a config.json describes.

        `max_model_len` fixes the rope scalings that depend on the length. None means the longest length that the
        configuration allows.

        Raises:
            ValueError: a key is missing, has the wrong type, or needs something that is not supported.
        """

    def tensor_source(self, name: str, spec: DecoderSpec) -> TensorSource:
        """The place of the canonical parameter `name` in a checkpoint of this model type."""


def family(model_type: str) -> Family:
    """The module for a `model_type`.

    Raises:
        ValueError: there is none. The message lists the supported types, or says what this one needs.
    """
    known = known_families()
    if model_type.startswith(HEADS):
        base = family(model_type.rpartition(".")[2])
        return HeadFamily(model_type, base.decoder_spec, base.tensor_source, predictor(base))
    if model_type in known:
        return cast(Family, importlib.import_module(f"shardline.models.families.{model_type}"))
    if refusal := _refusals().get(model_type.replace("-", "_")):  # some types have a hyphen
        raise ValueError(f"model_type {model_type!r} is not supported: {refusal}")
    close = difflib.get_close_matches(model_type, known, n=3)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    raise ValueError(f"model_type {model_type!r} is not supported{hint}; supported: {', '.join(known)}")


def predictor(found: Family) -> HeadLayout | None:
    """Where the checkpoints of a family have a layer for multi-token prediction; None: they have none."""
    layout: HeadLayout | None = getattr(found, "PREDICTOR", None)
    return layout


@functools.cache
def known_families() -> tuple[str, ...]:
    """Every supported model type."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(shardline.models.families.__path__)))


@functools.cache
def _refusals() -> Mapping[str, str]:
    """What the engine lacks, by the model type that needs it."""
    types: dict[str, list[str]] = json.loads(Path(__file__).with_name("unsupported.json").read_text(encoding="utf-8"))
    return {model_type: reason for reason, of_reason in types.items() for model_type in of_reason}


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None = None) -> DecoderSpec:
    """The model that a parsed config.json describes, by its `model_type`; of a wrapper, its language model.

    Raises:
        ValueError: the model type is missing or not supported, or the configuration is wrong.
    """
    hf = HFConfig(text_config(config))
    found = family(language_model_type(config))
    check_loadable(hf)
    spec = found.decoder_spec(hf, max_model_len)
    _check_experts(spec)
    if (classes := read_labels(config)) is not None:
        # The head of the family stands for nothing here: no logit of a token is computed.
        spec = replace(spec, num_labels=len(classes.labels), tied_embeddings=False, lm_head_bias=False)
    return without_norm_offsets(spec) if config.get(NORMS_HOLD_OFFSET) else spec


def _check_experts(spec: DecoderSpec) -> None:
    """Refuse a number of experts that no model has: a list of their weights would fill the memory.

    Raises:
        ValueError: there are too many.
    """
    experts = [routing.num_experts for one in spec.layers if (routing := one.feed_forward.routing) is not None]
    if sum(experts) > _MAX_EXPERTS:
        raise ValueError(
            f"the configuration has {sum(experts)} experts in {len(experts)} layers, and at most {_MAX_EXPERTS} are "
            "supported; it is damaged, so download it again"
        )


def language_model_type(config: Mapping[str, Any]) -> str:
    """The model type of the language model that a parsed config.json describes.

    Raises:
        ValueError: it is missing.
    """
    model_type = text_config(config).get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f"config.json has no model_type; supported: {', '.join(known_families())}")
    return model_type


def module_names(spec: DecoderSpec) -> Callable[[str], str]:
    """The name that a canonical parameter's module has in a checkpoint, as a function of the parameter's name."""
    source = family(spec.model_type).tensor_source
    return functools.cache(lambda name: source(name, spec).key.rpartition(".")[0])
