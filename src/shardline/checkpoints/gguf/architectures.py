"""What each architecture of GGUF is, in the terms of transformers: keys of a config.json from a file's metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardline.checkpoints.gguf.metadata import Metadata, rope_scaling, rounded

FULL, WINDOWED = "full_attention", "sliding_attention"


def layer_types(m: Metadata, usual_interval: int) -> list[str]:
    """The kind of each layer. If the file does not say it, every `usual_interval`-th layer has no window."""
    if m.has("attention.sliding_window_pattern"):
        return [WINDOWED if number else FULL for number in m.layer_numbers("attention.sliding_window_pattern")]
    return [WINDOWED if (index + 1) % usual_interval else FULL for index in range(m.num_blocks())]


def olmo2(m: Metadata) -> dict[str, Any]:
    """OLMo 2, or OLMo 3, which has windows; only its full layers stretch their rope."""
    bias = {"attention_bias": m.has_tensor("blk.0.attn_q.bias")}
    if not m.has("attention.sliding_window"):
        return {"model_type": "olmo2", **bias}
    theta = m.number("rope.freq_base", 500_000.0)
    full = (rope_scaling(m) or {"rope_type": "default"}) | {"rope_theta": theta}
    windowed = {"rope_type": "default", "rope_theta": m.number("rope.freq_base_swa", theta)}
    return {
        "model_type": "olmo3",
        **bias,
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": layer_types(m, 4),
        "rope_scaling": None,
        "rope_parameters": {FULL: full, WINDOWED: windowed},
    }


def exaone4(m: Metadata) -> dict[str, Any]:
    """EXAONE 4. Without a window in the file, all layers are full, and have rope."""
    window = m.integer("attention.sliding_window", 0) or None
    own: dict[str, Any] = {"model_type": "exaone4", "sliding_window": window}
    return own if window is None else own | {"layer_types": layer_types(m, 4)}


def cohere2(m: Metadata) -> dict[str, Any]:
    """Command R7B, Command A."""
    head_dim = m.width_per_head()
    if (rotated := m.integer("rope.dimension_count", head_dim)) != head_dim:
        raise m.error("rope.dimension_count", f"must be the size of a head, {head_dim}, got {rotated}")
    return {
        "model_type": "cohere2",
        "layer_norm_eps": rounded(m.number("attention.layer_norm_epsilon")),
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": layer_types(m, 4),
        "logit_scale": rounded(m.number("logit_scale")),
        "attention_bias": m.has_tensor("blk.0.attn_q.bias"),
    }


_NOT_ROTATED = np.float32(1e30)
"""What the file divides the frequencies of pairs by that do not rotate."""


def gemma4_config(m: Metadata) -> dict[str, Any]:
    """The keys of a config.json for gemma4_text that other architectures do not share.

    Raises:
        ValueError: layers differ in a way that this model type does not have.
    """
    is_windowed = [bool(number) for number in m.layer_numbers("attention.sliding_window_pattern")]
    sizes, shared = m.layer_numbers("feed_forward_length"), m.integer("attention.shared_kv_layers", 0)
    if not 0 <= shared < len(sizes):
        raise m.error("attention.shared_kv_layers", f"must leave some of {len(sizes)} layers, got {shared}")
    is_wide = sizes != sizes[:1] * len(sizes)
    doubled = [sizes[0] * (1 + (index >= len(sizes) - shared)) for index in range(len(sizes))]
    if is_wide and sizes != doubled:
        raise m.error("feed_forward_length", f"must be the same, or doubled in the last {shared} layers, got {sizes}")
    head_dim = m.integer("attention.key_length_swa")
    if (rotated := m.integer("rope.dimension_count_swa", head_dim)) != head_dim:
        raise m.error("rope.dimension_count_swa", f"must be the size of a head, {head_dim}, got {rotated}")
    config: dict[str, Any] = {
        "model_type": "gemma4_text",
        "layer_types": [WINDOWED if windowed else FULL for windowed in is_windowed],
        "sliding_window": m.integer("attention.sliding_window"),
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": is_wide,
        "num_key_value_heads": _kv_heads(m, is_windowed, True),
        "head_dim": head_dim,
        "attention_k_eq_v": _value_is_key(m, is_windowed, len(is_windowed) - shared),
        "num_kv_shared_layers": shared,
        "rope_scaling": None,
        "rope_parameters": _ropes(m),
        **_full_attention(m, is_windowed),
        **_token_input(m),
    }
    if m.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = m.number("final_logit_softcapping")
    if m.integer("expert_count", 0):
        config |= {
            "enable_moe_block": True,
            "num_experts": m.integer("expert_count"),
            "top_k_experts": m.integer("expert_used_count"),
            "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        }
    return config


def _full_attention(m: Metadata, is_windowed: list[bool]) -> dict[str, Any]:
    """The sizes of layers without a window. They hold whether or not values are keys."""
    sizes = {"head_dim": m.integer("attention.key_length"), "num_key_value_heads": _kv_heads(m, is_windowed, False)}
    return {"per_layer_config": {str(is_windowed.index(False)): sizes}}


def _kv_heads(m: Metadata, is_windowed: list[bool], kind: bool) -> int:
    """Heads of keys and values of the layers with a window, or of those without one."""
    numbers = m.layer_numbers("attention.head_count_kv")
    found = {number for number, windowed in zip(numbers, is_windowed, strict=True) if windowed == kind}
    if len(found) != 1:
        name = WINDOWED if kind else FULL
        raise m.error("attention.head_count_kv", f"must be one number for all layers with {name}, got {numbers}")
    return found.pop()


def _value_is_key(m: Metadata, is_windowed: list[bool], num_own: int) -> bool:
    """Whether full layers have no projection of values. Layers from `num_own` on read the cache of earlier ones."""
    full = [index for index in range(num_own) if not is_windowed[index]]
    return not any(m.has_tensor(f"blk.{index}.{key}.weight") for index in full for key in ("attn_v", "attn_qkv"))


def _ropes(m: Metadata) -> dict[str, Any]:
    """Both ropes. A tensor tells which pairs of a full layer's heads rotate: the first ones."""
    factors = np.array(m.factors("rope_freqs.weight") or [1.0], np.float32)
    rotated = int((factors == 1.0).sum())
    if not ((factors[:rotated] == 1.0).all() and (factors[rotated:] == _NOT_ROTATED).all()):
        raise m.header.error("rope_freqs.weight", "must be ones, and then 1e30 for pairs that do not rotate")
    full = {"rope_type": "proportional", "partial_rotary_factor": rotated / len(factors)}
    return {
        FULL: full | {"rope_theta": m.number("rope.freq_base", 1_000_000.0)},
        WINDOWED: {"rope_type": "default", "rope_theta": m.number("rope.freq_base_swa", 10_000.0)},
    }


def _token_input(m: Metadata) -> dict[str, Any]:
    """What layers read of each token. The tensor may have more rows than there are tokens."""
    size = m.integer("embedding_length_per_layer_input", 0)
    table = m.checkpoint.tensors.get("per_layer_token_embd.weight")
    rows = {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}
    return {"hidden_size_per_layer_input": size, **rows}


_LLAMA4_CHUNK, _MAVERICK_EXPERTS = 8192, 128
_SOFTMAX, _SIGMOID = 1, 2
"""Values of expert_gating_func."""


def _llama(m: Metadata) -> dict[str, Any]:
    head_dim = m.integer("attention.key_length", m.integer("rope.dimension_count", 0)) or None
    own: dict[str, Any] = {} if head_dim is None else {"head_dim": head_dim}
    if m.integer("expert_count", 0):
        return own | _experts(m, "num_local_experts") | {"model_type": "mixtral", "sliding_window": None}
    return own | {"model_type": "llama", **_biases(m)}


def _biases(m: Metadata) -> dict[str, Any]:
    return {
        "attention_bias": m.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": m.has_tensor("blk.0.ffn_gate.bias"),
    }


def _experts(m: Metadata, count_key: str) -> dict[str, Any]:
    return {count_key: m.integer("expert_count"), "num_experts_per_tok": m.integer("expert_used_count")}


def _mistral3(m: Metadata) -> dict[str, Any]:
    if not m.has("attention.temperature_scale"):  # the language model of Mistral Small 3
        return {"model_type": "mistral", "sliding_window": None}
    rope = (rope_scaling(m) or {"rope_type": "default"}) | {"rope_theta": m.number("rope.freq_base", 1e6)}
    rope["llama_4_scaling_beta"] = rounded(m.number("attention.temperature_scale"))
    if m.has("rope.scaling.yarn_log_multiplier"):
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), m.number("rope.scaling.yarn_log_multiplier"))
    return {"model_type": "ministral3", "rope_parameters": rope, "rope_scaling": None, "sliding_window": None}


def _granite(m: Metadata) -> dict[str, Any]:
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    multipliers = {name: rounded(m.number(key)) for name, key in keys.items() if m.has(key)}
    return {"model_type": "granite", **_biases(m), **multipliers}


def _smollm3(m: Metadata) -> dict[str, Any]:
    # The file does not say which layers have no rope: every fourth, in the one model of this architecture.
    return {"model_type": "smollm3", "no_rope_layer_interval": 4, **_biases(m)}


def _qwen2(m: Metadata) -> dict[str, Any]:
    return {"model_type": "qwen2"}


def _qwen3(m: Metadata) -> dict[str, Any]:
    return {"model_type": "qwen3"}


def _qwen2_moe(m: Metadata) -> dict[str, Any]:
    own = {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": m.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": m.flag("expert_weights_norm", False),
    }
    return own | _experts(m, "num_experts")


def _qwen3_moe(m: Metadata) -> dict[str, Any]:
    own = {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "norm_topk_prob": m.flag("expert_weights_norm", True),
    }
    return own | _experts(m, "num_experts")


def _qwen3_vl(m: Metadata) -> dict[str, Any]:
    return {"model_type": "qwen3_vl_text"}


def _qwen3_vl_moe(m: Metadata) -> dict[str, Any]:
    return _qwen3_moe(m) | {"model_type": "qwen3_vl_moe_text"}


def _seed_oss(m: Metadata) -> dict[str, Any]:
    return {"model_type": "seed_oss", **_biases(m), "attention_out_bias": m.has_tensor("blk.0.attn_output.bias")}


def _ernie(m: Metadata) -> dict[str, Any]:
    return {"model_type": "ernie4_5", "use_bias": m.has_tensor("blk.0.attn_q.bias")}


def _ernie_moe(m: Metadata) -> dict[str, Any]:
    return {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": m.integer("expert_count"),
        "moe_k": m.integer("expert_used_count"),
        "moe_layer_interval": m.integer("interleave_moe_layer_step", 1),
        "moe_layer_start_index": m.integer("leading_dense_block_count", 0),
        "moe_layer_end_index": m.last_layer_with("ffn_gate_inp.weight"),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": m.integer("expert_shared_count", 0),
    }


def _gemma(m: Metadata) -> dict[str, Any]:
    return {"model_type": "gemma"}


def _query_scale(m: Metadata, big_layers: int) -> int:
    """query_pre_attn_scalar, which files leave out: the head size, but hidden size / heads in the 27B models."""
    if m.num_blocks() == big_layers:
        return m.width_per_head()
    return m.integer("attention.key_length")


def _gemma2(m: Metadata) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        "query_pre_attn_scalar": _query_scale(m, 46),
        "sliding_window": m.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": m.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": m.number("final_logit_softcapping", 30.0),
    }


def _gemma3(m: Metadata) -> dict[str, Any]:
    own: dict[str, Any] = {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": _query_scale(m, 62),
        "sliding_window": m.integer("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": m.number("rope.freq_base_swa", 10_000.0),
        "rope_theta": m.number("rope.freq_base", 1_000_000.0),
    }
    if m.has("final_logit_softcapping"):
        own["final_logit_softcapping"] = m.number("final_logit_softcapping")
    return own


def _phi3(m: Metadata) -> dict[str, Any]:
    head_dim = max(1, m.width_per_head())
    return {
        "model_type": "phi3",
        "sliding_window": m.integer("attention.sliding_window", 0) or None,
        "partial_rotary_factor": m.integer("rope.dimension_count", head_dim) / head_dim,
        "original_max_position_embeddings": m.integer(
            "rope.scaling.original_context_length", m.integer("context_length")
        ),
    }


def _gpt_oss(m: Metadata) -> dict[str, Any]:
    own = {
        "model_type": "gpt_oss",
        "intermediate_size": m.integer("expert_feed_forward_length"),
        "sliding_window": m.integer("attention.sliding_window"),
    }
    if (scaling := rope_scaling(m)) is not None:
        own["rope_scaling"] = scaling | {"truncate": False}
    return own | _experts(m, "num_local_experts")


def _gpt2(m: Metadata) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": m.integer("embedding_length"),
        "n_head": m.integer("attention.head_count"),
        "n_layer": m.num_blocks(),
        "n_positions": m.integer("context_length"),
        "n_inner": m.integer("feed_forward_length"),
        "layer_norm_epsilon": rounded(m.number("attention.layer_norm_epsilon")),
    }


def _deepseek2(m: Metadata) -> dict[str, Any]:
    rope_dim = m.integer("rope.dimension_count")
    # Newer files have the sizes of absorbed attention in key_length and value_length.
    suffix = "_mla" if m.has("attention.key_length_mla") else ""
    key_size, value_size = (m.integer(f"attention.{part}_length{suffix}") for part in ("key", "value"))
    gating = m.integer("expert_gating_func", _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID):
        raise m.header.error("deepseek2.expert_gating_func", f"is {gating}, which is not supported")
    groups = m.integer("expert_group_count", 1)
    own: dict[str, Any] = {
        "model_type": "deepseek_v3" if gating == _SIGMOID else "deepseek_v2",
        "num_key_value_heads": m.integer("attention.head_count"),
        "head_dim": None,
        "q_lora_rank": m.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": m.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_size - rope_dim,
        "v_head_dim": value_size,
        "first_k_dense_replace": m.integer("leading_dense_block_count", 0),
        "n_routed_experts": m.integer("expert_count"),
        "num_experts_per_tok": m.integer("expert_used_count"),
        "n_shared_experts": m.integer("expert_shared_count", 0),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "routed_scaling_factor": rounded(m.number("expert_weights_scale", 1.0)),
        "norm_topk_prob": m.flag("expert_weights_norm", False),
        "scoring_func": "sigmoid" if gating == _SIGMOID else "softmax",
        "n_group": groups,
        "topk_group": m.integer("expert_group_used_count", 1),
        "topk_method": "noaux_tc" if gating == _SIGMOID else "group_limited_greedy" if groups > 1 else "greedy",
    }
    scaling = rope_scaling(m)
    if scaling is not None and scaling["rope_type"] == "yarn" and m.has("rope.scaling.yarn_log_multiplier"):
        # The file holds a tenth of the number.
        mscale = rounded(10 * m.number("rope.scaling.yarn_log_multiplier"))
        own["rope_scaling"] = scaling | {"mscale": mscale, "mscale_all_dim": mscale}
    return own


def _llama4(m: Metadata) -> dict[str, Any]:
    if m.integer("attention.sliding_window", _LLAMA4_CHUNK) == 0:
        raise m.header.error("llama4.attention.sliding_window", "is 0 (no chunks), which is not supported")
    whole = m.width_per_head()
    head_dim = m.integer("attention.key_length", m.integer("rope.dimension_count", whole))
    own = {
        "model_type": "llama4_text",
        "head_dim": head_dim,
        "intermediate_size": m.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": m.integer("feed_forward_length"),
        "interleave_moe_layer_step": m.integer("interleave_moe_layer_step", 1),
        "attention_chunk_size": _LLAMA4_CHUNK,
        # The file does not say so. Maverick, which has 128 experts, has no such norm.
        "use_qk_norm": m.integer("expert_count") != _MAVERICK_EXPERTS,
        "attention_bias": m.has_tensor("blk.0.attn_q.bias"),
    }
    return own | _experts(m, "num_local_experts")


def _sigmoid_experts(m: Metadata, count_key: str) -> dict[str, Any]:
    """Routing as in DeepSeek V3, without groups."""
    gating = m.integer("expert_gating_func", _SIGMOID)
    if gating != _SIGMOID:
        raise m.header.error(f"{m.architecture}.expert_gating_func", f"is {gating}, which is not supported")
    return _experts(m, count_key) | {"norm_topk_prob": m.flag("expert_weights_norm", True)}


def _glm4(m: Metadata) -> dict[str, Any]:
    if m.has("rope.dimension_sections"):
        raise m.error("rope.dimension_sections", "is there: files of GLM-4V have another order of rows, not supported")
    head_dim = m.size("attention.key_length", m.width_per_head())
    return {
        "model_type": "glm4",
        "head_dim": head_dim,
        "partial_rotary_factor": m.integer("rope.dimension_count", head_dim) / head_dim,
        "attention_bias": m.has_tensor("blk.0.attn_q.bias"),
    }


def _glm4_moe(m: Metadata) -> dict[str, Any]:
    head_dim = m.size("attention.key_length")
    own = {
        "model_type": "glm4_moe",
        "partial_rotary_factor": m.integer("rope.dimension_count") / head_dim,
        "attention_bias": m.has_tensor("blk.0.attn_q.bias"),
        "use_qk_norm": m.has_tensor("blk.0.attn_q_norm.weight"),
        "first_k_dense_replace": m.integer("leading_dense_block_count", 0),
        "n_shared_experts": m.integer("expert_shared_count", 0),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "routed_scaling_factor": rounded(m.number("expert_weights_scale", 1.0)),
        "n_group": 1,
        "topk_group": 1,
    }
    return own | _sigmoid_experts(m, "n_routed_experts")


def _minimax_m2(m: Metadata) -> dict[str, Any]:
    own = {
        "model_type": "minimax_m2",
        "intermediate_size": m.integer("expert_feed_forward_length"),
        "rotary_dim": m.integer("rope.dimension_count"),
    }
    return own | _sigmoid_experts(m, "num_local_experts")


ARCHITECTURES: Mapping[str, Callable[[Metadata], dict[str, Any]]] = {
    "cohere2": cohere2,
    "deepseek2": _deepseek2,
    "ernie4_5": _ernie,
    "ernie4_5-moe": _ernie_moe,
    "exaone4": exaone4,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": gemma4_config,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "granite": _granite,
    "llama": _llama,
    "llama4": _llama4,
    "minimax-m2": _minimax_m2,
    "mistral3": _mistral3,
    "olmo2": olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "qwen3vl": _qwen3_vl,
    "qwen3vlmoe": _qwen3_vl_moe,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
}
