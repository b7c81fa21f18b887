"""What the GPU kernels compute of models: a list of what they support, so a new part is refused until it is here."""

from __future__ import annotations

from collections.abc import Mapping

from shardline.models.spec import DecoderSpec

_SUPPORTED: Mapping[str, str] = {
    "DecoderSpec": "tied_embeddings embedding_scale learned_positions lm_head_bias logits_softcap",
    "Layer": "post_attention_norm post_feed_forward_norm",
    "GQA": "",
    "Projections": "qkv_bias output_bias",
    "Score": "softcap",
    "Positions": "rope",
    "Mask": "window",
    "HeadNorms": "qk_norm",
    "KV": "",
    "MLA": "",
    "LatentProjections": "q_lora_rank q_norm bias",
    "Dense": "gated bias silu gelu gelu_tanh relu",
    "MoE": "shared shared_gate",
    "Routing": "scoring normalized scale num_groups top_groups group_score correction_bias",
    "Norm": "weight_offset bias",
    "Rope": "attention_scaling interleaved",
}
"""See `Part.missing`."""


def gpu_refusal(spec: DecoderSpec) -> str:
    """Why GPUs cannot run a model, in one line; empty: they can."""
    missing = dict.fromkeys(what for part in (*dict.fromkeys(spec.layers), spec) for what in part.missing(_SUPPORTED))
    if not missing:
        return ""
    return f"{spec.model_type} runs on CPUs only: the GPU kernels have no {', no '.join(missing)}"
