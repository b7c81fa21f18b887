"""Nemotron-H and Nemotron 3: Mamba-2, attention without rope, and feed-forward blocks, in an order of their own.

Each of their blocks has one part and one norm. Here a layer is a Mamba or attention block, with the feed-forward block
that follows it, if there is one. Mamba-2 (Dao and Gu, 2024) is counted as linear attention whose key heads are its
groups, and whose key size is its state size; so it has a projection of one row per head too many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from shardline.models.attention import GQA, Attention, Projections, Score
from shardline.models.config_fields import Defaults, read_dims
from shardline.models.deepseek_like import group_routing
from shardline.models.feed_forward import Dense, MoE
from shardline.models.hf_config import HFConfig
from shardline.models.linear_attention import LinearAttention
from shardline.models.llama_like import decoder
from shardline.models.parameters import expert_of, parse_name
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec, Layer, TensorSource
from shardline.planner.models.parts.latent_moe import PlannedMoE

_LETTERS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_MODEL_KEYS = {"embed": "backbone.embeddings", "final_norm": "backbone.norm_f", "lm_head": "lm_head"}
_MIXER_KEYS: Mapping[str, str] = {
    "attention.z": "in_proj",
    "attention.beta": "in_proj",
    "attention.decay": "in_proj",
    **{f"attention.{part}_conv": "conv1d" for part in "qkv"},
    "attention.decay_log": "A_log",
    "attention.decay_offset": "dt_bias",
    "attention.norm": "norm",
    "attention.q": "q_proj",
    "attention.k": "k_proj",
    "attention.v": "v_proj",
    "feed_forward.up": "up_proj",
    "feed_forward.down": "down_proj",
    "feed_forward.router": "gate",
    "feed_forward.experts.*.up": "experts.*.up_proj",
    "feed_forward.experts.*.down": "experts.*.down_proj",
    "feed_forward.shared.up": "shared_experts.up_proj",
    "feed_forward.shared.down": "shared_experts.down_proj",
    "feed_forward.latent_down": "fc1_latent_proj",
    "feed_forward.latent_up": "fc2_latent_proj",
}
_DEFAULTS = Defaults(
    vocab=131072, hidden=4096, intermediate=21504, layers=52, heads=32, kv_heads=8, head_dim=128, positions=8192
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layers for multi-token prediction are left out."""
    head_dim = hf.optional_integer("head_dim", None) or hf.integer("attention_head_dim", 128)
    dims = read_dims(hf.with_values(head_dim=head_dim), _DEFAULTS)
    norm = Norm("rms", hf.number("layer_norm_epsilon", 1e-5))
    mixers: Mapping[str, Attention] = {
        "mamba": LinearAttention(
            num_heads=hf.integer("n_groups", 8),
            num_value_heads=hf.integer("mamba_num_heads", 128),
            key_head_dim=hf.integer("ssm_state_size", 128),
            value_head_dim=hf.integer("mamba_head_dim", 64),
            conv_width=hf.integer("conv_kernel", 4),
            norm=norm,
        ),
        "attention": GQA(dims.num_heads, Projections(dims.num_kv_heads, dims.head_dim), Score(dims.head_dim**-0.5)),
    }
    pairs = _paired(hf, _blocks(hf))

    @cache
    def layer(mixer: str, follower: str) -> Layer:
        if not follower:
            return Layer(mixers[mixer], Dense(0, "relu", gated=False), norm, None)
        dense = Dense(dims.intermediate_size, "relu", gated=False)
        return Layer(mixers[mixer], _experts(hf) if follower == "moe" else dense, norm, norm)

    return decoder(hf.with_values(model_type="nemotron_h"), dims, norm, (layer(*pair) for pair in pairs))


def _blocks(hf: HFConfig) -> list[str]:
    """The kind of each block, from either of the two keys that configurations have."""
    if hf.has("layers_block_type"):
        return list(hf.names("layers_block_type"))
    pattern = hf.text("hybrid_override_pattern")
    if unknown := sorted(set(pattern) - set(_LETTERS)):
        raise hf.error("hybrid_override_pattern", f"has {unknown[0]!r}; known: {', '.join(_LETTERS)}")
    return [_LETTERS[letter] for letter in pattern]


def _experts(hf: HFConfig) -> MoE:
    routing = group_routing(hf, num_experts=None, chosen=None, scale=1.0)
    expert = Dense(hf.integer("moe_intermediate_size"), "relu", gated=False)
    num_shared = hf.integer("n_shared_experts", 1, minimum=0)
    shared_size = num_shared * hf.integer("moe_shared_expert_intermediate_size", expert.intermediate_size)
    shared = Dense(shared_size, "relu", gated=False) if num_shared else None
    if (latent := hf.optional_integer("moe_latent_size", None)) is None:
        return MoE(routing, expert, shared)
    return PlannedMoE(routing, expert, shared, latent=latent)


def _paired(hf: HFConfig, blocks: Sequence[str]) -> list[tuple[str, str]]:
    """(Mamba or attention block, the block that follows it or nothing) of each layer."""
    pairs: list[tuple[str, str]] = []
    for block in blocks:
        if block not in _LETTERS.values():
            raise hf.error("layers_block_type", f"has {block!r}; known: {', '.join(_LETTERS.values())}")
        if block in ("mamba", "attention"):
            pairs.append((block, ""))
        elif not pairs or pairs[-1][1]:
            raise hf.error("layers_block_type", f"has a block of kind {block} that follows no Mamba or attention block")
        else:
            pairs[-1] = (pairs[-1][0], block)
    return pairs


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`. The blocks of a checkpoint are counted one by one."""
    layer, part, kind = parse_name(name)
    if layer is None:
        return TensorSource(f"{_MODEL_KEYS[part]}.{kind}")
    block = sum(2 if one.feed_forward_norm is not None else 1 for one in spec.layers[:layer])
    block += part.startswith("feed_forward")
    if part.endswith("_norm"):
        return TensorSource(f"backbone.layers.{block}.norm.{kind}")
    if part == "feed_forward.router" and kind == "bias":
        return TensorSource(f"backbone.layers.{block}.mixer.gate.e_score_correction_bias")
    expert = expert_of(part)
    is_mamba = not spec.layers[layer].attention.key_dim
    if part == "attention.o":
        key = "out_proj" if is_mamba else "o_proj"
    elif is_mamba and part in ("attention.q", "attention.k", "attention.v"):
        key = "in_proj"
    elif expert is None:
        key = _MIXER_KEYS[part]
    else:
        key = _MIXER_KEYS[part.replace(f".{expert}.", ".*.")].replace("*", str(expert))
    return TensorSource(f"backbone.layers.{block}.mixer.{key}.{kind}")
