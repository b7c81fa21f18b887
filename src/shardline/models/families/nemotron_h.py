"""Nemotron-H and Nemotron 3: Mamba-2, attention without rope, and feed-forward blocks, in an order of their own.

Each of their blocks has one part and one norm. Here a layer is a Mamba or attention block, with the feed-forward block
that follows it, if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from msgspec.structs import replace

from shardline.models.attention import GQA, Attention, Projections, Score
from shardline.models.config_fields import Defaults, read_activation, read_conv_width, read_dims
from shardline.models.deepseek_like import group_routing
from shardline.models.feed_forward import Dense, MoE
from shardline.models.hf_config import HFConfig
from shardline.models.llama_like import decoder
from shardline.models.mamba import Mamba2
from shardline.models.parameters import expert_of, parse_name
from shardline.models.parts import Activation, Norm
from shardline.models.spec import DecoderSpec, Layer, TensorSource

_KINDS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Of blocks, by their letters in `hybrid_override_pattern`."""
_OTHER_NAMES: Mapping[str, str] = {"linear_attention": "mamba", "full_attention": "attention"}
"""Of kinds, in transformers."""
_MODEL_KEYS = {"embed": "backbone.embeddings", "final_norm": "backbone.norm_f", "lm_head": "lm_head"}
_MIXER_KEYS: Mapping[str, str] = {
    "attention.decay_log.bias": "A_log",
    "attention.decay_offset.bias": "dt_bias",
    "attention.skip.bias": "D",
    "attention.o": "o_proj",
    "attention.q": "q_proj",
    "attention.k": "k_proj",
    "attention.v": "v_proj",
    "feed_forward.up": "up_proj",
    "feed_forward.down": "down_proj",
    "feed_forward.router.bias": "gate.e_score_correction_bias",
    "feed_forward.router": "gate",
    "feed_forward.experts.*.up": "experts.*.up_proj",
    "feed_forward.experts.*.down": "experts.*.down_proj",
    "feed_forward.shared.up": "shared_experts.up_proj",
    "feed_forward.shared.down": "shared_experts.down_proj",
    "feed_forward.latent_down": "fc1_latent_proj",
    "feed_forward.latent_up": "fc2_latent_proj",
}
_OWN_PARTS = (
    *("attention_norm", "feed_forward_norm", "attention.norm", "attention.z", "attention.step"),
    *("attention.q_conv", "attention.k_conv", "attention.v_conv"),
)
"""Parts without a key of their own."""
_DEFAULTS = Defaults(
    vocab=131072, hidden=4096, intermediate=21504, layers=52, heads=32, kv_heads=8, head_dim=128, positions=4096
)
_MOE_DEFAULTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
_DEFAULT_BLOCKS = ("mamba", "moe", "attention", "mlp")


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layers for multi-token prediction are left out."""
    hf = hf.with_values(defaults=_MOE_DEFAULTS, tie_word_embeddings=False)  # transformers ties none
    head_dim = hf.optional_integer("head_dim", None) or hf.integer("attention_head_dim", 128)
    dims = read_dims(hf.with_values(head_dim=head_dim), _DEFAULTS)
    norm = Norm("rms", hf.number("layer_norm_epsilon", 1e-5))
    if hf.flag("use_bias", False):
        raise hf.error("use_bias", "is not supported")
    if hf.text("mamba_hidden_act", "silu") != "silu":
        raise hf.error("mamba_hidden_act", "must be silu")
    limits = hf.values.get("time_step_limit") or ()
    if not isinstance(limits, list | tuple):
        raise hf.error("time_step_limit", f"must be a list of two numbers, got {limits!r:.80}")
    if any(isinstance(limit, float | int) and 0 < limit < 1e30 for limit in limits):
        raise hf.error("time_step_limit", f"bounds steps, which is not supported: {limits!r:.80}")
    groups, heads = hf.integer("n_groups", 8), hf.integer("mamba_num_heads", 128)
    if heads % groups:
        raise hf.error("mamba_num_heads", f"{heads} is no multiple of n_groups, {groups}")
    activation = read_activation(hf, "mlp_hidden_act", "relu2")
    mixers: Mapping[str, Attention] = {
        "mamba": Mamba2(
            num_heads=groups,
            num_value_heads=heads,
            key_head_dim=hf.integer("ssm_state_size", 128),
            value_head_dim=hf.integer("mamba_head_dim", 64),
            conv_width=read_conv_width(hf, "conv_kernel"),
            norm=norm,
            conv_bias=hf.flag("use_conv_bias", True),
        ),
        "attention": GQA(dims.num_heads, Projections(dims.num_kv_heads, dims.head_dim), Score(dims.head_dim**-0.5)),
    }
    dense = Dense(dims.intermediate_size, activation, gated=False, bias=hf.flag("mlp_bias", False))
    pairs = _paired(hf, _blocks(hf))

    @cache
    def layer(mixer: str, follower: str) -> Layer:
        if not follower:
            return Layer(mixers[mixer], Dense(0, activation, gated=False), norm, None)
        return Layer(mixers[mixer], _experts(hf, activation) if follower == "moe" else dense, norm, norm)

    return decoder(hf.with_values(model_type="nemotron_h"), dims, norm, (layer(*pair) for pair in pairs))


def _blocks(hf: HFConfig) -> list[str]:
    """The kind of each block, from either of the two keys that configurations have."""
    if hf.has("layers_block_type"):
        return [_OTHER_NAMES.get(name, name) for name in hf.names("layers_block_type")]
    if not hf.has("hybrid_override_pattern"):
        return list(_DEFAULT_BLOCKS)
    pattern = hf.text("hybrid_override_pattern")
    if unknown := sorted(set(pattern) - set(_KINDS)):
        raise hf.error("hybrid_override_pattern", f"has {unknown[0]!r}; known: {', '.join(_KINDS)}")
    return [_KINDS[letter] for letter in pattern]


def _experts(hf: HFConfig, activation: Activation) -> MoE:
    if hf.flag("mlp_bias", False):
        raise hf.error("mlp_bias", "is not supported with experts")
    routing = group_routing(hf, num_experts=None, chosen=None, scale=1.0)
    expert = Dense(hf.integer("moe_intermediate_size"), activation, gated=False)
    shared = replace(expert, intermediate_size=hf.integer("moe_shared_expert_intermediate_size"))
    return MoE(routing, expert, shared, latent=hf.optional_integer("moe_latent_size", None))


def _paired(hf: HFConfig, blocks: Sequence[str]) -> list[tuple[str, str]]:
    """(Mamba or attention block, the block that follows it or nothing) of each layer."""
    pairs: list[tuple[str, str]] = []
    for block in blocks:
        if block not in _KINDS.values():
            raise hf.error("layers_block_type", f"has {block!r}; known: {', '.join(_KINDS.values())}")
        if block in ("mamba", "attention"):
            pairs.append((block, ""))
        elif not pairs or pairs[-1][1]:
            raise hf.error("layers_block_type", f"has a block of kind {block} that follows no Mamba or attention block")
        else:
            pairs[-1] = (pairs[-1][0], block)
    return pairs


def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
    """See `lookup.Family`. Adapters name modules as transformers does, whose models have no backbone."""
    source = _source(name, spec)
    return replace(source, aliases=(source.key.replace("backbone.", "model.", 1),))


def _source(name: str, spec: DecoderSpec) -> TensorSource:
    """The place in a checkpoint, whose blocks are counted one by one."""
    layer, part, kind = parse_name(name)
    expert = expert_of(part)
    pattern = part if expert is None else part.replace(f".{expert}.", ".*.")
    if layer is None and part in _MODEL_KEYS:
        return TensorSource(f"{_MODEL_KEYS[part]}.{kind}")
    if layer is None or not (pattern in _MIXER_KEYS or f"{part}.{kind}" in _MIXER_KEYS or part in _OWN_PARTS):
        raise ValueError(f"{name!r} is no parameter of this model type")
    block = sum(2 if one.feed_forward_norm is not None else 1 for one in spec.layers[:layer])
    block += part.startswith("feed_forward")
    prefix, mixer = f"backbone.layers.{block}", spec.layers[layer].attention
    if part.endswith("_norm"):
        return TensorSource(f"{prefix}.norm.{kind}")
    if (key := _MIXER_KEYS.get(f"{part}.{kind}")) is not None:
        return TensorSource(f"{prefix}.mixer.{key}")
    if isinstance(mixer, Mamba2) and part.startswith("attention."):
        return _mamba_source(mixer, part.removeprefix("attention."), kind, f"{prefix}.mixer")
    return TensorSource(f"{prefix}.mixer.{_MIXER_KEYS[pattern].replace('*', str(expert))}.{kind}")


def _mamba_source(mamba: Mamba2, part: str, kind: str, prefix: str) -> TensorSource:
    """The place of `part` of a Mamba block. The rows of its projection are those of gates, values, keys, queries and
    steps, and the channels of its convolution are values, keys and queries."""
    if part in ("o", "norm"):
        return TensorSource(f"{prefix}.{'out_proj' if part == 'o' else 'norm'}.{kind}")
    values, keys = mamba.output_size, mamba.key_size
    channels = {"v": (0, values), "k": (values, keys), "q": (values + keys, keys)}
    if part.endswith("_conv"):
        return TensorSource(f"{prefix}.conv1d.{kind}", rows=channels[part[0]], squeezed=kind == "weight")
    rows = {"z": (0, values), "step": (2 * values + 2 * keys, mamba.num_value_heads)}
    rows |= {name: (values + start, count) for name, (start, count) in channels.items()}
    return TensorSource(f"{prefix}.in_proj.{kind}", rows=rows[part])
