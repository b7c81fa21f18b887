"""Llama-Nemotron models that a search has shrunk: some layers have no attention, and feed-forward blocks vary in size.

The feed-forward block of a layer without attention is counted as a part of the layer before: bytes and arithmetic are
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from shardline.models.attention import GQA, Positions, Projections, Score
from shardline.models.config_fields import divided, read_activation, read_dtype
from shardline.models.feed_forward import Dense
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import LAYER_KEYS, checkpoint_keys
from shardline.models.parts import Norm
from shardline.models.rope import read_rope
from shardline.models.spec import DecoderSpec, Layer

_SIZE_STEP = 256


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`."""
    hidden, heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    head_dim = divided(hf, "hidden_size", hidden, heads)
    rope = read_rope(hf, head_dim, hf.integer("max_position_embeddings"))
    norm = Norm("rms", hf.number("rms_norm_eps", 1e-5))
    activation = read_activation(hf, "hidden_act", "silu")

    positions = Positions(rope.build(max_model_len))

    @cache
    def layer(heads_in_group: int, size: int) -> Layer:
        gqa = GQA(heads, Projections(heads // heads_in_group, head_dim), Score(head_dim**-0.5), positions)
        return Layer(gqa, Dense(size, activation), norm, norm)

    return DecoderSpec(
        model_type="nemotron_nas",
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hidden,
        layers=tuple(layer(*sizes) for sizes in _attention_layers(hf, hidden)),
        final_norm=norm,
        max_position_embeddings=rope.max_length,
        dtype=read_dtype(hf),
        tied_embeddings=hf.flag("tie_word_embeddings", False),
    )


def _attention_layers(hf: HFConfig, hidden: int) -> list[tuple[int, int]]:
    """For each layer with attention: the query heads of a KV head, and the size of the feed-forward blocks up to the
    next layer with attention."""
    blocks = hf.values.get("block_configs")
    if not isinstance(blocks, Sequence) or not blocks:
        raise hf.error("block_configs", "must list the layers")
    found: list[tuple[int, int]] = []
    for block in blocks:
        attention, feed_forward = HFConfig(block).section("attention"), HFConfig(block).section("ffn")
        for part in (attention, feed_forward):
            part.only("replace_with_linear", False)
        size = 0 if feed_forward.flag("no_op", False) else _size(hidden, feed_forward.number("ffn_mult"))
        if not attention.flag("no_op", False):
            found.append((attention.integer("n_heads_in_group"), size))
        elif not found:
            raise hf.error("block_configs", "must begin with a layer that has attention")
        else:
            found[-1] = (found[-1][0], found[-1][1] + size)
    return found


def _size(hidden: int, multiple: float) -> int:
    """The size of a feed-forward block: 2/3 of `multiple` * hidden, up to a multiple of 256."""
    return -(-int(2 * multiple * hidden / 3) // _SIZE_STEP) * _SIZE_STEP


tensor_source = checkpoint_keys(LAYER_KEYS)
"""Layers are not those of the checkpoint, since some of these are joined."""
