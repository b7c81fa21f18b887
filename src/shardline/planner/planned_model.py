"""Read any configuration for planning, also of checkpoints and model types that the engine refuses to load."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

import shardline.planner.models
from shardline.checkpoints.gguf.checkpoint import GGUFCheckpoint, GGUFStoredWeights
from shardline.checkpoints.hub import ModelFiles
from shardline.checkpoints.lookup import Family, decoder_spec, family, known_families
from shardline.checkpoints.quantization import read_stored
from shardline.checkpoints.wrapper import text_config
from shardline.deployment.gpu_support import computed_by_torch, gpu_refusal
from shardline.models.hf_config import HFConfig
from shardline.models.parts import DType
from shardline.models.spec import DecoderSpec
from shardline.models.stored_weights import StoredRules, StoredWeights

_ASSUMED_DTYPE = "bfloat16"
"""Type of checkpoints that do not say it: all published ones of this kind are in bfloat16."""


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A model as the planner sees it. Equal only to itself, so that results can be kept for it."""

    name: str
    config: Mapping[str, Any]
    """config.json of the language model."""
    spec: DecoderSpec
    rules: StoredRules
    """What the checkpoint stores."""
    other_parameters: int
    """Parameters beside the language model: an encoder of images. They are in 16 bits and whole on every rank."""
    engine_refusal: str
    """Why this engine cannot load the checkpoint, or not run it on GPUs; empty: it can."""
    files: ModelFiles | None = None
    """The GGUF file, whose header was read; None: only config.json was read."""

    def stored(self, rules: StoredRules | None = None) -> StoredWeights:
        """The bytes of the checkpoint's tensors, or of the same model stored by other `rules`."""
        if rules is None and self.checkpoint is not None:
            return GGUFStoredWeights(self.rules, self.spec.dtype, lambda name: name, self.checkpoint, self.spec)
        source = planned_family(self.spec.model_type).tensor_source

        @functools.cache
        def module(name: str) -> str:
            return source(name, self.spec).key.rpartition(".")[0]

        return StoredWeights(self.rules if rules is None else rules, self.spec.dtype, module)

    def with_dtype(self, dtype: DType, refusal: str = "") -> PlannedModel:
        """The model with its unquantized weights in `dtype`; `refusal` says why this engine cannot run it so."""
        refusal = self.engine_refusal or refusal
        if dtype == self.spec.dtype and refusal == self.engine_refusal:
            return self
        return replace(self, spec=msgspec.structs.replace(self.spec, dtype=dtype), engine_refusal=refusal)

    @functools.cached_property
    def by_torch(self) -> Mapping[str, str]:
        """The ops that this engine leaves to torch on GPUs, and why."""
        return {} if self.engine_refusal else computed_by_torch(self.spec)

    @functools.cached_property
    def checkpoint(self) -> GGUFCheckpoint | None:
        """The tensors of the GGUF file."""
        return None if self.files is None or self.files.gguf is None else GGUFCheckpoint.open(self.files.gguf)


def read_planned_gguf(files: ModelFiles) -> PlannedModel:
    """The model in a GGUF file.

    Raises:
        ValueError: the file is broken, or lacks tensors that every engine needs.
    """
    planned = replace(read_planned(files.name, files.config), files=files)
    assert planned.checkpoint is not None
    try:
        planned.checkpoint.check(planned.spec)
    except ValueError as problem:
        planned = replace(planned, engine_refusal=planned.engine_refusal or str(problem))
    return planned


def read_planned(name: str, config: Mapping[str, Any]) -> PlannedModel:
    """The model that a parsed config.json describes.

    Raises:
        ValueError: its type has no spec, or the configuration is wrong.
    """
    text = planned_config(config)
    return PlannedModel(
        name=name,
        config=text,
        spec=_spec(text),
        rules=read_stored(HFConfig(text)),
        other_parameters=_encoder_parameters(HFConfig(config).section("vision_config")),
        engine_refusal=_engine_refusal(config),
    )


def planned_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the language model in `config`, which may be a wrapper. It has a dtype."""
    text = text_config(config)
    if text.get("dtype") is None and text.get("torch_dtype") is None:
        text["dtype"] = _ASSUMED_DTYPE
    return text


def planned_family(model_type: str) -> Family:
    """The module for a `model_type`, of the engine's or for planning only.

    Raises:
        ValueError: there is none.
    """
    name = model_type.replace("-", "_")  # some types have a hyphen
    if model_type not in known_families() and name in planned_families():
        return cast(Family, importlib.import_module(f"{shardline.planner.models.__name__}.{name}"))
    return family(model_type)


@functools.cache
def planned_families() -> tuple[str, ...]:
    """The model types that only the planner knows."""
    modules = pkgutil.iter_modules(shardline.planner.models.__path__)
    return tuple(sorted(module.name for module in modules if not module.ispkg))


def _spec(text: Mapping[str, Any]) -> DecoderSpec:
    hf = HFConfig(text)
    model_type, known = hf.text("model_type"), {*known_families(), *planned_families()}
    if model_type.replace("-", "_") not in known:
        raise ValueError(f"no spec for model_type {model_type!r}; known: {', '.join(sorted(known))}")
    return planned_family(model_type).decoder_spec(hf, None)


def _engine_refusal(config: Mapping[str, Any]) -> str:
    try:
        return gpu_refusal(decoder_spec(config))
    except ValueError as refusal:
        return str(refusal)


def _encoder_parameters(vision: HFConfig) -> int:
    """Parameters of the blocks of a vision transformer: four projections of attention, and two of its feed-forward.

    Embeddings and the projection to the language model are left out: they are below a tenth of that.
    """
    hidden = vision.optional_integer("hidden_size", None) or vision.optional_integer("vt_hidden_size", None)
    if hidden is None:
        return 0
    keys = ("num_hidden_layers", "depth", "vt_num_hidden_layers")
    layers = next((vision.integer(key) for key in keys if vision.has(key)), 0)
    key = "intermediate_size" if vision.has("intermediate_size") else "vt_intermediate_size"
    matrices = 3 if vision.text("hidden_act", "gelu") == "silu" else 2
    return layers * (4 * hidden * hidden + matrices * hidden * vision.integer(key, 4 * hidden))
