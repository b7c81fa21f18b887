"""What the GPU kernels compute of models. It lists what they support, so that a new part is refused until it is here.

A part of a model may set the fields that are listed for its type. All other fields must have their defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from shardline.models.attention import GQA, KV, MLA, HeadNorms, Mask, Positions, Projections, Score
from shardline.models.feed_forward import Dense, MoE, Routing
from shardline.models.parts import Norm, Rope
from shardline.models.spec import DecoderSpec, Layer

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
_SUPPORTED: Mapping[type[Struct], str] = {
    DecoderSpec: "model_type vocab_size hidden_size layers final_norm max_position_embeddings dtype tied_embeddings"
    " embedding_scale learned_positions lm_head_bias logits_softcap",
    Layer: "attention feed_forward attention_norm feed_forward_norm post_attention_norm post_feed_forward_norm",
    GQA: "num_heads projections score positions mask norms kv",
    Projections: "num_kv_heads head_dim qkv_bias output_bias",
    Score: "scale softcap",
    Positions: "rope",
    Mask: "window",
    HeadNorms: "qk_norm",
    KV: "",
    MLA: "num_heads kv_lora_rank nope_head_dim rope_head_dim value_head_dim scale rope kv_norm q_lora_rank q_norm bias",
    Dense: "intermediate_size activation gated bias",
    MoE: "routing expert shared shared_gate",
    Routing: "num_experts experts_per_token scoring normalized scale num_groups top_groups group_score correction_bias",
    Norm: "kind eps weight_offset bias",
    Rope: "inv_freq attention_scaling interleaved",
}
"""The fields of each part that may be set."""
_WORDS: Mapping[str, str] = {
    "DecoderSpec.logits_scale": "scaled logits",
    "Layer.parallel": "parallel blocks",
    "Layer.residual_scale": "scale of the residual stream",
    "Layer.output_scale": "scale of the residual stream",
    "Layer.token_input": "layers with inputs of their own for each token",
    "Score.sinks": "attention sinks",
    "Mask.chunked": "attention in chunks",
    "HeadNorms.norms_all_heads": "norm over all heads",
    "HeadNorms.rotated_norm": "norm after rope",
    "KV.kv_source": "layers that read the cache of another layer",
    "Projections.value_is_key": "values made of keys",
    "HeadNorms.value_norm": "values made of keys",
    "Positions.query_scale": "scale of queries by position",
    "MLA.query_scale": "scale of queries by position",
    "MoE.own_norms": "experts beside a dense block",
    "Routing.logits_bias": "bias of a router's logits",
    "Routing.logits_scale": "scale of a router's logits",
    "Routing.expert_scale": "scale of experts' weights",
    "Routing.scales_input": "scale of experts' inputs",
    "Norm.rounds_once": "norm that rounds once",
}
"""What messages say of a field that is not supported. They name another one as it is."""


def gpu_refusal(spec: DecoderSpec) -> str:
    """Why GPUs cannot run a model, in one line; empty: they can."""
    missing = dict.fromkeys(what for part in (*dict.fromkeys(spec.layers), spec) for what in _missing(part))
    if not missing:
        return ""
    return f"{spec.model_type} runs on CPUs only: the GPU kernels have no {', no '.join(missing)}"


def _missing(part: Struct) -> Iterator[str]:
    """What the GPU kernels lack for a part and for the parts in it."""
    supported, kind = _SUPPORTED.get(type(part)), type(part).__name__
    if supported is None:
        yield kind
        return
    for field in fields(part):
        value = getattr(part, field.name)
        if field.name not in supported.split():
            if field.default is NODEFAULT or value != field.default:
                yield _WORDS.get(f"{kind}.{field.name}", f"{kind}.{field.name}")
        elif isinstance(value, Struct):
            yield from _missing(value)
    if isinstance(part, Layer) and not part.parallel and None in (part.attention_norm, part.feed_forward_norm):
        yield "blocks without a norm before them"
    elif isinstance(part, MoE) and part.expert.bias:
        yield "biases of experts"
    elif isinstance(part, Dense) and part.activation not in _ACTIVATIONS:
        yield "clamped gate" if part.activation == "clamped_swish" else f"activation {part.activation}"
