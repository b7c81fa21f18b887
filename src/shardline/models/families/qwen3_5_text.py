"""Qwen3.5: gated linear attention in three of four layers, gated attention in the others, dense blocks."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from shardline.models.config_fields import Defaults, layer_types, read_conv_width
from shardline.models.feed_forward import Dense, MoE
from shardline.models.hf_config import HFConfig
from shardline.models.linear_attention import LinearAttention
from shardline.models.llama_like import LAYER_KEYS, KeyFinder, LlamaLike, checkpoint_keys, llama_like
from shardline.models.parameters import parse_name
from shardline.models.parts import Norm
from shardline.models.spec import DecoderSpec, TensorSource

_LINEAR_KEYS: Mapping[str, str] = {
    "attention.z": "linear_attn.in_proj_z",
    "attention.beta": "linear_attn.in_proj_b",
    "attention.decay": "linear_attn.in_proj_a",
    "attention.decay_log.bias": "linear_attn.A_log",
    "attention.decay_offset.bias": "linear_attn.dt_bias",
    "attention.norm": "linear_attn.norm",
    "attention.o": "linear_attn.out_proj",
}
_DEFAULTS = Defaults(
    vocab=248320, hidden=4096, intermediate=12288, layers=32, heads=16, kv_heads=4, head_dim=256, positions=32768
)


def decoder_spec(hf: HFConfig, max_model_len: int | None) -> DecoderSpec:
    """See `lookup.Family`. The layer for multi-token prediction is left out."""
    return hybrid_spec(read_llama(hf, max_model_len))


def read_llama(hf: HFConfig, max_model_len: int | None, defaults: Defaults = _DEFAULTS) -> LlamaLike:
    """What the configuration states in the keys of Llama."""
    hf = hf.with_values(defaults={"partial_rotary_factor": 0.25})
    return llama_like(hf, max_model_len, defaults, norm=Norm("rms", 1e-6, weight_offset=1.0), partial=True)


def hybrid_spec(llama: LlamaLike, feed_forward: Dense | MoE | None = None) -> DecoderSpec:
    """The model with this block in all layers; None: Llama's."""
    hf = llama.hf
    full = llama.layer(
        llama.biased(qk_norm=llama.norm, output_gate=hf.flag("attn_output_gate", True)),
        feed_forward,
    )
    linear = LinearAttention(
        num_heads=hf.integer("linear_num_key_heads", 16),
        num_value_heads=hf.integer("linear_num_value_heads", 32),
        key_head_dim=hf.integer("linear_key_head_dim", 128),
        value_head_dim=hf.integer("linear_value_head_dim", 128),
        conv_width=read_conv_width(hf, "linear_conv_kernel_dim"),
        norm=Norm("rms", llama.norm.eps),
    )
    if linear.num_value_heads % linear.num_heads:
        raise hf.error("linear_num_value_heads", f"{linear.num_value_heads} is no multiple of the key heads")
    layers = {"full_attention": full, "linear_attention": replace(full, attention=linear)}
    every, num_layers = hf.integer("full_attention_interval", 4), llama.dims.num_layers
    types = ["linear_attention" if (index + 1) % every else "full_attention" for index in range(num_layers)]
    return llama.spec(layers[kind] for kind in layer_types(hf, num_layers, types, tuple(layers)))


def hybrid_keys(plain: KeyFinder) -> KeyFinder:
    """The `tensor_source` of a family in which all but linear attention has the keys that `plain` finds."""
    linear = checkpoint_keys(
        _LINEAR_KEYS, fused={"linear_attn.in_proj_qkv": tuple(f"attention.{part}" for part in "qkv")}
    )
    convolved = checkpoint_keys({}, fused={"linear_attn.conv1d": tuple(f"attention.{part}_conv" for part in "qkv")})

    def tensor_source(name: str, spec: DecoderSpec) -> TensorSource:
        layer, part, _ = parse_name(name)
        if layer is None or not part.startswith("attention.") or spec.layers[layer].attention.key_dim:
            return plain(name, spec)
        if not part.endswith("_conv"):
            return linear(name, spec)
        source = convolved(name, spec)
        return TensorSource(source.key, rows=source.rows, squeezed=True)

    return tensor_source


tensor_source = hybrid_keys(checkpoint_keys(LAYER_KEYS))
