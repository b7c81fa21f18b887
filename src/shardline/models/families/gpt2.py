"""GPT-2: learned positions, LayerNorm, and biases everywhere. Weights are stored as [in, out], q, k and v in one
tensor."""

from __future__ import annotations

from shardline.models.attention import GQA, Projections, Score
from shardline.models.config_fields import MAX_LAYERS, divided, read_activation, read_dtype
from shardline.models.feed_forward import Dense
from shardline.models.hf_config import HFConfig
from shardline.models.parameters import parse_name
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec, Layer, TensorSource

_MODEL_KEYS = {"embed": "wte", "positions": "wpe", "final_norm": "ln_f"}
_LAYER_KEYS = {
    "attention_norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.o": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hf.only("add_cross_attention", False)
    hidden_size, num_heads = hf.integer("n_embd", 768), hf.integer("n_head", 12)
    head_dim = divided(hf, "n_embd", hidden_size, num_heads)
    norm = Norm("layer", hf.number("layer_norm_epsilon", 1e-5), bias=True)
    dense = Dense(
        hf.integer("n_inner", 4 * hidden_size),
        read_activation(hf, "activation_function", "gelu_new"),
        gated=False,
        bias=True,
    )
    scale = head_dim**-0.5 if hf.flag("scale_attn_weights", True) else 1.0
    by_layer = hf.flag("scale_attn_by_inverse_layer_idx", False)
    num_positions = hf.integer("n_positions", 1024)

    def layer(index: int) -> Layer:
        own_scale = scale / (index + 1) if by_layer else scale
        gqa = GQA(num_heads, Projections(num_heads, head_dim, qkv_bias=True, output_bias=True), Score(own_scale))
        return Layer(gqa, dense, attention_norm=norm, feed_forward_norm=norm)

    return DecoderSpec(
        model_type="gpt2",
        vocab_size=hf.integer("vocab_size", 50257),
        hidden_size=hidden_size,
        layers=tuple(layer(index) for index in range(hf.integer("n_layer", 12, maximum=MAX_LAYERS))),
        final_norm=norm,
        max_position_embeddings=num_positions,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", True),
        learned_positions=num_positions,
    )


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`."""
    layer, part, kind = parse_name(name)
    if part in ("lm_head", "classifier"):
        return TensorSource("lm_head.weight" if part == "lm_head" else "score.weight")
    keys = _MODEL_KEYS if layer is None else _LAYER_KEYS
    if part not in keys:
        raise ValueError(f"{name!r} is no parameter of this model type")
    key = f"{keys[part]}.{kind}" if layer is None else f"h.{layer}.{keys[part]}.{kind}"
    size = spec.hidden_size
    rows = {"attention.q": (0, size), "attention.k": (size, size), "attention.v": (2 * size, size)}.get(part)
    is_linear = layer is not None and not part.endswith("norm")
    # The first checkpoints, for example "gpt2" on the hub, have no prefix.
    return TensorSource(f"transformer.{key}", is_linear and kind == "weight", rows, aliases=(key,))
