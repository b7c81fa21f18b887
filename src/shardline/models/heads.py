"""Heads: the layers with which a model's hidden states guess tokens, and their places in checkpoints.

A head has the model type `heads.METHOD.BASE`: its layers are those of the family BASE.

- `eagle`: a checkpoint of its own, with a projection and a layer without the norm before attention (Li et al., 2024,
  "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty"), or with two norms before the projection
  (Zhang et al., 2024, "HASS").
- `eagle3`: a projection of what three layers of the model read, and a layer whose attention reads it beside the token
  (Li et al., 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test").
- `mtp`: a layer in the model's own checkpoint for multi-token prediction, with norms (DeepSeek-AI, 2024, "DeepSeek-V3
  Technical Report", section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from shardline.models.attention import GQA
from shardline.models.hf_config import HFConfig
from shardline.models.parameters import parse_name
from shardline.models.spec import DecoderSpec, HeadInput, Layer, TensorSource

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
    renamed: tuple[tuple[str, str], ...] = ()
    """Beginnings of keys, and what the library `speculators` has in their place."""
    hidden_first: bool = False
    """See `HeadInput`."""
    returns_normed: bool = False
    """See `HeadInput`."""

    def names_in_library(self, key: str, layer: int = 0) -> list[str]:
        """What the library `speculators` calls a tensor, of a layer perhaps, where it has another name for it."""
        return [new.format(layer=layer) + key.removeprefix(old) for old, new in self.renamed if key.startswith(old)]


_EAGLE = HeadLayout(
    layers="layers.{layer}.",
    others={
        "head_input.token_norm": "embedding_layernorm",
        "head_input.hidden_norm": "hidden_states_layernorm",
        "head_input.projection": "fc",
    },
    renamed=(("layers.0.", "transformer."), ("fc.", "fusion_fc.")),
)
_EAGLE3 = HeadLayout(
    layers="midlayer.",
    others={
        "head_input.token_norm": "midlayer.input_layernorm",
        "head_input.hidden_norm": "midlayer.hidden_norm",
        "head_input.sources_norm": "input_norm",
        "head_input.projection": "fc",
        "final_norm": "norm",
        "lm_head": "lm_head",
    },
    renamed=(("midlayer.", "layers.{layer}."),),
)
_OFFSETS = "d2t"
"""The key of the tensor of `HeadInput.names_tokens`."""
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

LIBRARY_KIND = "speculators_model_type"
"""Key of a configuration that the library `speculators` has saved: the kind of head."""
MODEL_POSITIONS = "head_model_positions"
PROJECTION_BIAS = "head_projection_bias"
SOURCES, NAMES_TOKENS = "head_sources", "head_names_tokens"
"""Keys that a head's configuration has besides its own: what the model and the checkpoint say."""


def mtp_config(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration of the head that a model's checkpoint has; `config` is that of the language model."""
    return {**config, "model_type": f"{HEADS}mtp.{config.get('model_type')}"}


def eagle_config(config: Mapping[str, object], positions: int, *, bias: bool) -> dict[str, object]:
    """The configuration of an EAGLE head for a model with so many `positions`; `bias`: its projection has one."""
    model_type = f"{HEADS}eagle.{config.get('model_type')}"
    return {**config, "model_type": model_type, MODEL_POSITIONS: positions, PROJECTION_BIAS: bias}


def eagle3_config(
    config: Mapping[str, object], positions: int, num_layers: int, *, bias: bool, names_tokens: bool
) -> dict[str, object]:
    """The configuration of an EAGLE 3 head for a model with so many `positions` and layers.

    `names_tokens`: its lm_head has some of the model's tokens.

    Raises:
        ValueError: it reads layers that the model does not have.
    """
    own = config.get("eagle_config")
    named = {**config, **(own if isinstance(own, Mapping) else {})}.get("eagle_aux_hidden_state_layer_ids")
    sources = (2, num_layers // 2, num_layers - 3) if named is None else named
    if not isinstance(sources, (list, tuple)) or not all(type(one) is int and 0 <= one < num_layers for one in sources):
        raise ValueError(f"it reads the inputs of the layers {sources}, and the model has {num_layers} layers")
    return {
        **eagle_config(config, positions, bias=bias),
        "model_type": f"{HEADS}eagle3.{config.get('model_type')}",
        "vocab_size": config.get("draft_vocab_size") or config.get("vocab_size"),
        SOURCES: [str(one) for one in sources],
        NAMES_TOKENS: names_tokens,
    }


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
        if self.model_type.startswith(f"{HEADS}eagle3."):
            return _EAGLE3
        assert self.predictor is not None
        return self.predictor

    def decoder_spec(self, hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
        """See `lookup.Family`."""
        base = self.base_spec(hf.with_values(model_type=self.model_type.rpartition(".")[2]), max_model_len)
        layout, positions = self._layout, base.max_position_embeddings
        if layout in (_EAGLE, _EAGLE3):
            # Its configuration often names the length of its training texts; no weight depends on it.
            positions = hf.integer(MODEL_POSITIONS)
        if layout is _EAGLE3:
            further = base.layers[1:] if hf.has(LIBRARY_KIND) else ()
            layers: tuple[Layer, ...] = (_beside_token(base.layers[0]), *further)
            head = HeadInput(
                base.final_norm,
                hf.flag(PROJECTION_BIAS, False),
                output_norm=True,
                returns_normed=hf.flag("norm_output", False),
                sources=tuple(map(int, hf.names(SOURCES))),
                own_lm_head=True,
                names_tokens=hf.flag(NAMES_TOKENS, False),
                sources_norm=hf.flag("norm_before_fc", False),
                source_norms=hf.flag("fc_norm", False),
                residual_normed=hf.flag("norm_before_residual", False),
            )
        elif layout is _EAGLE:
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
        if part == "head_input.token_offsets":
            return TensorSource(_OFFSETS)
        if layer is None:
            before, _, number = part.partition("head_input.source_norms.")
            own = f"fc_norm.{number}" if number else layout.others[before].format(place=place)
            key = f"{own}.{kind}"
            return TensorSource(key, aliases=tuple(layout.names_in_library(key)))
        source, former = self.base_source(name, spec), f"{_BASE_LAYERS}{layer}."
        own = layout.layers.format(place=place, layer=layer)
        keys = (source.key, *source.aliases)
        first, *others = (key.replace(former, own) for key in keys)
        others += layout.names_in_library(first, layer)
        if layout is _EAGLE:
            others += keys  # some are stored as whole models
        return replace(source, key=first, aliases=tuple(others), apart=source.apart.replace(former, own))


def _beside_token(layer: Layer) -> Layer:
    """A layer whose attention reads tokens beside hidden states.

    Raises:
        ValueError: no head is known that has this kind of attention.
    """
    attention = layer.attention
    if not isinstance(attention, GQA):
        raise ValueError("EAGLE 3 heads with latent attention are not supported; use one with grouped-query attention")
    projections = replace(attention.projections, reads_token=True)
    return replace(layer, attention=replace(attention, projections=projections), attention_norm=None)
