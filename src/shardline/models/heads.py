"""Heads: the layers with which a model's hidden states guess tokens, and their places in checkpoints.

A head has the model type `heads.METHOD.BASE`: its layers are those of the family BASE.

- `eagle`: a checkpoint of its own, with a projection and a layer without the norm before attention (Li et al., 2024,
  "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty"), or with two norms before the projection
  (Zhang et al., 2024, "HASS").
- `mtp`: a layer in the model's own checkpoint for multi-token prediction, with norms (DeepSeek-AI, 2024, "DeepSeek-V3
  Technical Report", section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from shardline.models.hf_config import HFConfig
from shardline.models.parameters import parse_name
from shardline.models.spec import DecoderSpec, HeadInput, TensorSource

HEADS = "heads."
"""Beginning of their model types."""
_BASE_LAYERS = "model.layers."


@dataclass(frozen=True)
class HeadLayout:
    """Where the tensors of a head lie; `{place}` and `{layer}` stand for numbers."""

    layers: str
    """What the keys of a layer begin with."""
    others: Mapping[str, str]
    """The keys of the other parts."""
    hidden_first: bool = False
    """See `HeadInput`."""
    returns_normed: bool = False
    """See `HeadInput`."""


_EAGLE = HeadLayout(
    layers="layers.{layer}.",
    others={
        "head_input.token_norm": "embedding_layernorm",
        "head_input.hidden_norm": "hidden_states_layernorm",
        "head_input.projection": "fc",
    },
)
LAYER_LAYOUT = HeadLayout(
    layers="model.layers.{place}.",
    others={
        "head_input.token_norm": "model.layers.{place}.enorm",
        "head_input.hidden_norm": "model.layers.{place}.hnorm",
        "head_input.projection": "model.layers.{place}.eh_proj",
        "final_norm": "model.layers.{place}.shared_head.norm",
    },
)
"""As one more layer of the model. A family whose checkpoints have a head says where, with the name PREDICTOR."""

MODEL_POSITIONS = "head_model_positions"
PROJECTION_BIAS = "head_projection_bias"
"""Keys that a head's configuration has besides its own: what the model and the checkpoint say."""


def mtp_config(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration of the head that a model's checkpoint has; `config` is that of the language model."""
    return {**config, "model_type": f"{HEADS}mtp.{config.get('model_type')}"}


def eagle_config(config: Mapping[str, object], positions: int, *, bias: bool) -> dict[str, object]:
    """The configuration of an EAGLE head for a model with so many `positions`; `bias`: its projection has one."""
    model_type = f"{HEADS}eagle.{config.get('model_type')}"
    return {**config, "model_type": model_type, MODEL_POSITIONS: positions, PROJECTION_BIAS: bias}


@dataclass(frozen=True)
class HeadFamily:
    """See `lookup.Family`: heads whose layers are those of another family."""

    model_type: str
    base_spec: Callable[[HFConfig, int | None], DecoderSpec]
    base_source: Callable[[str, DecoderSpec], TensorSource]
    predictor: HeadLayout | None
    """The layout of the head in the checkpoints of the family; None: they have none."""

    @property
    def _layout(self) -> HeadLayout:
        if self.model_type.startswith(f"{HEADS}eagle."):
            return _EAGLE
        assert self.predictor is not None
        return self.predictor

    def decoder_spec(self, hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
        """See `lookup.Family`."""
        base = self.base_spec(hf.with_values(model_type=self.model_type.rpartition(".")[2]), max_model_len)
        layout, positions = self._layout, base.max_position_embeddings
        if layout is _EAGLE:
            # Its configuration often names the length of its training texts; no weight depends on it.
            positions = hf.integer(MODEL_POSITIONS)
            layers = (replace(base.layers[0], attention_norm=None), *base.layers[1:])
            norm = base.final_norm if hf.flag("add_para_norm", False) else None
            head = HeadInput(norm, hf.flag(PROJECTION_BIAS, False))
        else:
            layers = base.layers[-1:]
            head = HeadInput(
                base.final_norm,
                hidden_first=layout.hidden_first,
                output_norm=True,
                returns_normed=layout.returns_normed,
                place=len(base.layers),
            )
        return replace(
            base,
            model_type=self.model_type,
            layers=layers,
            max_position_embeddings=positions,
            tied_embeddings=False,
            learned_positions=None,
            head_input=head,
        )

    def tensor_source(self, name: str, spec: DecoderSpec) -> TensorSource:
        """See `lookup.Family`."""
        layer, part, kind = parse_name(name)
        assert spec.head_input is not None
        layout, place = self._layout, spec.head_input.place
        if layer is None:
            return TensorSource(f"{layout.others[part].format(place=place)}.{kind}")
        source, former = self.base_source(name, spec), f"{_BASE_LAYERS}{layer}."
        own = layout.layers.format(place=place, layer=layer)
        keys = (source.key, *source.aliases)
        first, *others = (key.replace(former, own) for key in keys)
        if layout is _EAGLE:
            others += keys  # some are stored as whole models
        return replace(source, key=first, aliases=tuple(others), apart=source.apart.replace(former, own))
