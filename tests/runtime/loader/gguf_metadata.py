"""The metadata of GGUF files, as llama.cpp's converter writes it for each architecture."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    writer.kv_data[0].pop(key, None)
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def add_config(w: gguf.GGUFWriter, c: dict[str, Any], split_latents: bool) -> None:
    """The metadata of each architecture, as the converter writes it."""
    if c["model_type"] == "gpt2":
        w.add_block_count(c["n_layer"])
        w.add_context_length(c["n_positions"])
        w.add_embedding_length(c["n_embd"])
        w.add_feed_forward_length(4 * c["n_embd"])
        w.add_head_count(c["n_head"])
        w.add_layer_norm_eps(c["layer_norm_epsilon"])
        return
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_head_count(c["num_attention_heads"])
    if "rms_norm_eps" in c:
        w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    if c["model_type"] == "gemma4_text":
        _add_gemma4(w, c)
        return
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count_kv(1 if split_latents else c["num_key_value_heads"])
    rope = c.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    w.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if c.get("head_dim") and not c["model_type"].startswith("deepseek"):
        w.add_key_length(c["head_dim"])
        w.add_value_length(c["head_dim"])
    if c.get("sliding_window") and c["model_type"] in ("gemma2", "gemma3_text", "gpt_oss", "phi3"):
        w.add_sliding_window(c["sliding_window"])
    if c.get("num_local_experts") or c.get("num_experts") or c.get("n_routed_experts"):
        w.add_expert_count(c.get("num_local_experts") or c.get("num_experts") or c["n_routed_experts"])
        w.add_expert_used_count(c["num_experts_per_tok"])
    if "moe_intermediate_size" in c:
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in c:
        w.add_expert_shared_feed_forward_length(c["shared_expert_intermediate_size"])
    if c["model_type"] in ("gemma2",):
        w.add_attn_logit_softcapping(c["attn_logit_softcapping"])
        w.add_final_logit_softcapping(c["final_logit_softcapping"])
    _add_others(w, c, rope)
    if c["model_type"] == "phi3":
        w.add_rope_dimension_count(c["hidden_size"] // c["num_attention_heads"])
    if c["model_type"].startswith("deepseek"):
        _add_deepseek(w, c, split_latents)
    if c["model_type"] in ("glm4_moe", "llama4_text", "minimax_m2"):
        _add_mixture(w, c)
    if c["model_type"] == "granite":
        w.add_attention_scale(c["attention_multiplier"])
        w.add_embedding_scale(c["embedding_multiplier"])
        w.add_residual_scale(c["residual_multiplier"])
        w.add_logit_scale(c["logits_scaling"])
    if c["model_type"] == "ministral3":
        _add_yarn(w, rope)
        w.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        w.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if c["model_type"] == "gpt_oss":
        _add_yarn(w, rope)
        w.add_expert_feed_forward_length(c["intermediate_size"])
    if rope.get("rope_type") == "llama3":
        w.add_tensor("rope_freqs.weight", _llama3_factors(c, rope))


def _add_gemma4(w: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    """The metadata of Gemma 4, whose layers differ."""
    is_windowed = [kind == "sliding_attention" for kind in c["layer_types"]]
    full: dict[str, Any] = next(iter((c.get("per_layer_config") or {}).values()), {})
    head_dim: Any = full.get("head_dim", c.get("global_head_dim"))
    kv_heads = full.get("num_key_value_heads", c.get("num_global_key_value_heads"))
    size, shared, count = c["intermediate_size"], c["num_kv_shared_layers"], c["num_hidden_layers"]
    w.add_feed_forward_length(size)
    if c["use_double_wide_mlp"]:
        w.kv_data[0].pop("gemma4.feed_forward_length")
        w.add_feed_forward_length([size * (1 + (index >= count - shared)) for index in range(count)])
    if kv_heads is None:
        w.add_head_count_kv(c["num_key_value_heads"])
    else:
        w.add_head_count_kv([c["num_key_value_heads"] if windowed else kv_heads for windowed in is_windowed])
    w.add_shared_kv_layers(shared)
    w.add_embedding_length_per_layer_input(c["hidden_size_per_layer_input"] or 0)
    w.add_sliding_window(c["sliding_window"])
    w.add_sliding_window_pattern(is_windowed)
    for add, dims in (
        (w.add_key_length, head_dim),
        (w.add_value_length, head_dim),
        (w.add_key_length_swa, c["head_dim"]),
        (w.add_value_length_swa, c["head_dim"]),
        (w.add_rope_dimension_count, head_dim),
        (w.add_rope_dimension_count_swa, c["head_dim"]),
    ):
        add(dims)
    ropes = c["rope_parameters"]
    w.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    w.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    rotated = int(head_dim * ropes["full_attention"]["partial_rotary_factor"] / 2)
    w.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (head_dim // 2 - rotated), np.float32))
    if c.get("final_logit_softcapping"):
        w.add_final_logit_softcapping(c["final_logit_softcapping"])
    if c.get("enable_moe_block"):
        w.add_expert_count(c["num_experts"])
        w.add_expert_used_count(c["top_k_experts"])
        w.add_expert_feed_forward_length(c["moe_intermediate_size"])


def _add_others(w: gguf.GGUFWriter, c: dict[str, Any], rope: dict[str, Any]) -> None:
    """The metadata of the families whose converters add little."""
    kind, head_dim = c["model_type"], c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    if kind.startswith("qwen3_vl"):
        w.add_rope_dimension_sections([head_dim // 2, 0, 0, 0])
        w.add_num_deepstack_layers(3)
    if kind == "glm4":
        w.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if kind == "ernie4_5_moe":
        w.add_expert_count(c["moe_num_experts"])
        w.add_expert_used_count(c["moe_k"])
        w.add_interleave_moe_layer_step(c["moe_layer_interval"])
        w.add_leading_dense_block_count(c["moe_layer_start_index"])
        w.add_expert_shared_count(c["moe_num_shared_experts"])
    if kind in ("olmo3", "exaone4", "cohere2") and c["sliding_window"]:
        w.add_sliding_window(c["sliding_window"])
    if kind in ("olmo3", "exaone4"):
        w.add_sliding_window_pattern([kind == "sliding_attention" for kind in c["layer_types"]])
    if kind == "olmo3" and rope["rope_type"] == "yarn":
        _add_yarn(w, rope)
    if kind == "cohere2":
        w.add_layer_norm_eps(c["layer_norm_eps"])
        w.add_logit_scale(c["logit_scale"])
        w.add_rope_dimension_count(head_dim)
        w.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def _add_mixture(w: gguf.GGUFWriter, c: dict[str, Any]) -> None:
    """The metadata of GLM 4.5, Llama 4 and MiniMax M2."""
    if c["model_type"] == "llama4_text":
        w.add_feed_forward_length(c["intermediate_size_mlp"])
        w.add_expert_feed_forward_length(c["intermediate_size"])
        w.add_interleave_moe_layer_step(c["interleave_moe_layer_step"])
        w.add_rope_dimension_count(c["head_dim"])
        return
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if c["model_type"] == "minimax_m2":
        w.add_expert_feed_forward_length(c["intermediate_size"])
        w.add_rope_dimension_count(c["rotary_dim"])
        return
    w.add_rope_dimension_count(int(c["head_dim"] * 0.5))
    w.add_leading_dense_block_count(c["first_k_dense_replace"])
    w.add_expert_shared_count(c["n_shared_experts"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    w.add_expert_weights_norm(c["norm_topk_prob"])
    w.add_nextn_predict_layers(0)


def _add_yarn(w: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    w.add_rope_scaling_factor(rope["factor"])
    w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    w.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
    w.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))


def _add_deepseek(w: gguf.GGUFWriter, c: dict[str, Any], split_latents: bool) -> None:
    w.add_leading_dense_block_count(c["first_k_dense_replace"])
    if c.get("q_lora_rank"):
        w.add_q_lora_rank(c["q_lora_rank"])
    w.add_kv_lora_rank(c["kv_lora_rank"])
    key_size = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    if split_latents:
        w.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
        w.add_value_length(c["kv_lora_rank"])
        w.add_key_length_mla(key_size)
        w.add_value_length_mla(c["v_head_dim"])
    else:
        w.add_key_length(key_size)
        w.add_value_length(c["v_head_dim"])
    w.add_rope_dimension_count(c["qk_rope_head_dim"])
    w.add_expert_shared_count(c["n_shared_experts"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    if c["model_type"] == "deepseek_v3":
        w.add_expert_group_count(c["n_group"])
        w.add_expert_group_used_count(c["topk_group"])
        w.add_expert_weights_norm(c["norm_topk_prob"])
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _llama3_factors(c: dict[str, Any], rope: dict[str, Any]) -> Array:
    """The numbers by which the converter says that frequencies are to be divided."""
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    freqs = 1.0 / (rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim))
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    factors = []
    for freq in freqs:
        length = 2 * np.pi / freq
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)
