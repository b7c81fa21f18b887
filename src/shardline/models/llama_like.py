"""What Llama-like model types share: sizes, attention, layers, and keys of checkpoints.

A family calls `llama_like`, changes the parts in which it differs, and makes a DecoderSpec of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec.structs import replace

from shardline.models.attention import GQA, Positions, Projections, Score
from shardline.models.config_fields import Defaults, Dims, layer_windows, read_activation, read_dims, read_dtype
from shardline.models.feed_forward import Dense, MoE
from shardline.models.hf_config import HFConfig
from shardline.models.parameters import expert_of, parse_name
from shardline.models.parts import Norm
from shardline.models.rope import RopeConfig, read_rope
from shardline.models.spec import DecoderSpec, Layer, TensorSource

KeyFinder = Callable[[str, DecoderSpec], TensorSource]
"""See `lookup.Family.tensor_source`."""

_MODEL_KEYS = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "classifier": "score",
}
LAYER_KEYS: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
"""Maps a canonical part to its key below `model.layers.{i}.`, for models with a norm before each block.

An asterisk stands for the number of an expert. A part with `.weight` or `.bias` maps to the whole name of a tensor.
"""

MOE_LAYER_KEYS: Mapping[str, str] = {
    **LAYER_KEYS,
    "feed_forward.router": "mlp.gate",
    "feed_forward.experts.*.gate": "mlp.experts.*.gate_proj",
    "feed_forward.experts.*.up": "mlp.experts.*.up_proj",
    "feed_forward.experts.*.down": "mlp.experts.*.down_proj",
    "feed_forward.shared.gate": "mlp.shared_expert.gate_proj",
    "feed_forward.shared.up": "mlp.shared_expert.up_proj",
    "feed_forward.shared.down": "mlp.shared_expert.down_proj",
    "feed_forward.shared_gate": "mlp.shared_expert_gate",
}
MIXTRAL_LAYER_KEYS: Mapping[str, str] = {
    **LAYER_KEYS,
    "feed_forward.router": "block_sparse_moe.gate",
    "feed_forward.experts.*.gate": "block_sparse_moe.experts.*.w1",
    "feed_forward.experts.*.up": "block_sparse_moe.experts.*.w3",
    "feed_forward.experts.*.down": "block_sparse_moe.experts.*.w2",
}
FOUR_NORM_LAYER_KEYS: Mapping[str, str] = {
    **LAYER_KEYS,
    "post_attention_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "post_feed_forward_norm": "post_feedforward_layernorm",
}
"""The same for models with a norm before and after each block."""
POST_NORM_LAYER_KEYS: Mapping[str, str] = {
    part: key for part, key in FOUR_NORM_LAYER_KEYS.items() if part not in ("attention_norm", "feed_forward_norm")
}
"""The same for models with a norm after each block only."""


LLAMA_NORM = Norm("rms", 1e-6)


@dataclass(frozen=True)
class LlamaLike:
    """What a config.json states in the keys of Llama."""

    hf: HFConfig
    dims: Dims
    norm: Norm
    rope: RopeConfig
    attention: GQA
    dense: Dense

    def biased(self, **values: Any) -> GQA:
        """The attention with a bias in each linear if attention_bias says so, and with other `values` of its fields."""
        bias = self.hf.flag("attention_bias", False)
        return self.attention.changed(qkv_bias=bias, output_bias=bias, **values)

    def biased_dense(self) -> Dense:
        """The feed-forward block with biases if mlp_bias says so."""
        return replace(self.dense, bias=self.hf.flag("mlp_bias", False))

    def by_window(
        self, layer: Callable[[int | None], Layer], window: int | None, default_types: Sequence[str]
    ) -> list[Layer]:
        """`layer(its window)` for each layer, see `layer_windows`. Layers with the same window are one object."""
        windows = layer_windows(self.hf, self.dims.num_layers, window, default_types)
        made = {window: layer(window) for window in windows}
        return [made[window] for window in windows]

    def layer(self, attention: GQA | None = None, feed_forward: Dense | MoE | None = None) -> Layer:
        """A layer with a norm before each block. A part that is None is Llama's."""
        return Layer(attention or self.attention, feed_forward or self.dense, self.norm, self.norm)

    def four_norm_layer(self, attention: GQA, feed_forward: Dense | MoE | None = None) -> Layer:
        """A layer with a norm before and after each block."""
        norm = self.norm
        return replace(self.layer(attention, feed_forward), post_attention_norm=norm, post_feed_forward_norm=norm)

    def post_norm_layer(self, attention: GQA) -> Layer:
        """A layer with a norm after each block only."""
        return replace(self.four_norm_layer(attention), attention_norm=None, feed_forward_norm=None)

    def spec(self, layers: Layer | Iterable[Layer], *, tied: bool = False) -> DecoderSpec:
        """The model with these layers, or with equal ones. `tied` is the default of tie_word_embeddings."""
        return decoder(self.hf, self.dims, self.norm, layers, max_length=self.rope.max_length, tied=tied)


def llama_like(
    hf: HFConfig,
    max_model_len: int | None,
    defaults: Defaults,
    *,
    norm: Norm = LLAMA_NORM,
    eps_key: str = "rms_norm_eps",
    rope: RopeConfig | None = None,
    theta: float = 10_000.0,
    partial: bool = False,
    interleaved: bool = False,
    activation: str = "silu",
    activation_key: str = "hidden_act",
) -> LlamaLike:
    """Read the keys of Llama. The other arguments are what transformers assumes if keys are missing.

    `norm` has the default of its eps, which is in `eps_key`. `rope` is not read here if it is given. `partial` allows a
    rope of a part of each head, and `interleaved` says that it rotates neighbouring elements.

    Raises:
        ValueError: a key is missing, has the wrong type, or needs something that is not supported.
    """
    dims = read_dims(hf, defaults)
    if rope is None:
        rope = read_rope(hf, dims.head_dim, dims.max_position_embeddings, default_theta=theta, partial=partial)
    return LlamaLike(
        hf=hf,
        dims=dims,
        norm=replace(norm, eps=hf.number(eps_key, norm.eps)),
        rope=rope,
        attention=GQA(
            dims.num_heads,
            Projections(dims.num_kv_heads, dims.head_dim),
            Score(dims.head_dim**-0.5),
            Positions(replace(rope.build(max_model_len), interleaved=interleaved)),
        ),
        dense=Dense(dims.intermediate_size, read_activation(hf, activation_key, activation)),
    )


def decoder(
    hf: HFConfig,
    dims: Dims,
    norm: Norm,
    layers: Layer | Iterable[Layer],
    *,
    max_length: int | None = None,
    tied: bool = False,
) -> DecoderSpec:
    """The model with these layers, or with equal ones.

    `max_length` is its longest sequence; None: max_position_embeddings. `tied` is the default of tie_word_embeddings.
    """
    return DecoderSpec(
        model_type=hf.text("model_type"),
        vocab_size=dims.vocab_size,
        hidden_size=dims.hidden_size,
        layers=(layers,) * dims.num_layers if isinstance(layers, Layer) else tuple(layers),
        final_norm=norm,
        max_position_embeddings=dims.max_position_embeddings if max_length is None else max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", tied),
    )


class StackedExperts(NamedTuple):
    """Experts of a layer in two tensors below `model.layers.{i}.{module}`: gate and up in one, down in the other.

    Weights are [experts, in, out] if they are `transposed`, else [experts, out, in]; biases are [experts, out]. The
    outputs of gate and up are `alternating`, or those of gate come first. Quantizers may store each linear apart.
    """

    module: str
    transposed: bool = True
    alternating: bool = False

    def find(self, name: str, spec: DecoderSpec) -> TensorSource | None:
        """The place of the canonical parameter `name`; None: it belongs to no expert."""
        layer, part, kind = parse_name(name)
        expert = expert_of(part)
        if layer is None or expert is None:
            return None
        moe = spec.layers[layer].feed_forward
        assert moe.routing is not None
        projection = part.rpartition(".")[2]
        module = f"model.layers.{layer}.{self.module}"
        key = f"{module}.{'down_proj' if projection == 'down' else 'gate_up_proj'}"
        rows = None
        if projection != "down":
            size, is_up = moe.block.intermediate_size, projection == "up"
            rows = (int(is_up), size) if self.alternating else (size * is_up, size)
        return TensorSource(
            key if kind == "weight" else f"{key}_bias",
            transposed=self.transposed and kind == "weight",
            rows=rows,
            row_step=2 if self.alternating and rows is not None else 1,
            index=(expert, moe.routing.num_experts),
            apart=f"{module}.{expert}.{projection}_proj.{kind}",
        )


def checkpoint_keys(
    layer_keys: Mapping[str, str],
    *,
    stacked: StackedExperts | None = None,
    fused: Mapping[str, tuple[str, ...]] | None = None,
) -> KeyFinder:
    """The `tensor_source` of a family with these keys.

    Experts are stored one by one, or `stacked`. `fused` maps the key of a tensor to the parts whose rows it has, one
    part after the other.
    """
    key_of = {part: key for key, parts in (fused or {}).items() for part in parts}

    def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
        layer, part, kind = parse_name(name)
        if layer is not None and fused is not None and part in key_of:
            key = key_of[part]
            sizes = {name: shape[0] for name, shape in spec.layers[layer].parameters(spec.hidden_size)}
            before = fused[key][: fused[key].index(part)]
            rows = sum(sizes[f"{one}.{kind}"] for one in before), sizes[f"{part}.{kind}"]
            return TensorSource(f"model.layers.{layer}.{key}.{kind}", rows=rows)
        source = None if stacked is None else stacked.find(name, spec)
        return source or llama_source(name, layer_keys)

    return tensor_source


def llama_source(name: str, layer_keys: Mapping[str, str] = LAYER_KEYS) -> TensorSource:
    """The place of the canonical parameter `name` in a checkpoint with Llama's key names.

    Raises:
        ValueError: such checkpoints do not have this parameter.
    """
    layer, part, kind = parse_name(name)
    named = _MODEL_KEYS if layer is None else layer_keys
    expert = expert_of(part)
    pattern = part if expert is None else part.replace(f".{expert}.", ".*.")
    prefix = "" if layer is None else f"model.layers.{layer}."
    if f"{pattern}.{kind}" in named:
        return TensorSource(prefix + named[f"{pattern}.{kind}"])
    if pattern not in named:
        raise ValueError(f"{name!r} is no parameter of this model type")
    key = named[pattern] if expert is None else named[pattern].replace("*", str(expert))
    return TensorSource(f"{prefix}{key}.{kind}")
