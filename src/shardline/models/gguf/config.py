"""A config.json for a GGUF file, from its metadata and the shapes and types of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardline.models.gguf.checkpoint import GGUFCheckpoint
from shardline.models.gguf.header import PACKED_TYPES, GGUFArray, GGUFHeader
from shardline.models.gguf.norms import NORMS_HOLD_OFFSET
from shardline.models.gguf.special_tokens import end_token_ids
from shardline.models.wrapper import text_config

_LLAMA4_CHUNK, _MAVERICK_EXPERTS = 8192, 128
_SOFTMAX, _SIGMOID = 1, 2
"""Values of expert_gating_func."""


class _Metadata:
    """The metadata of one architecture, typed."""

    def __init__(self, checkpoint: GGUFCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.header: GGUFHeader = checkpoint.header
        self.architecture = checkpoint.architecture

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number. If the file has a list with a number per layer, all must be equal."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._error(key, f"must be a whole number, got {value!r:.40}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._error(key, f"must be a finite number, got {value!r:.40}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._error(key, f"must be true or false, got {value!r:.40}")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._error(key, f"must be a string, got {value!r:.40}")
        return value

    def has(self, key: str) -> bool:
        """Whether the architecture's key exists."""
        return f"{self.architecture}.{key}" in self.header.metadata

    def has_tensor(self, key: str) -> bool:
        """Whether the file has a tensor of this name."""
        return key in self.checkpoint.tensors

    def factors(self, key: str) -> list[float] | None:
        """The numbers of a small F32 tensor; None: there is no such tensor."""
        tensor = self.checkpoint.tensors.get(key)
        if tensor is None:
            return None
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.num_bytes > 1 << 16:
            raise ValueError(f"{tensor.file}: {key} must be a short vector of F32, not {tensor.type.name}")
        values = np.fromfile(tensor.file, dtype="<f4", count=tensor.shape[0], offset=tensor.offset)
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise ValueError(f"{tensor.file}: {key} has values that are not positive; download the file again")
        return [float(value) for value in values]

    def _value(self, key: str, default: Any) -> Any:
        full = f"{self.architecture}.{key}"
        value = self.header.metadata.get(full, default)
        if value is None:
            raise self._error(key, "is missing")
        if isinstance(value, GGUFArray):
            numbers = self.header.numbers(full)
            assert numbers is not None, "it exists"
            if len(numbers) == 0 or (numbers != numbers[0]).any():
                raise self._error(key, "differs between layers, which is not supported")
            return numbers[0].item()
        return value

    def _error(self, key: str, problem: str) -> ValueError:
        return self.header.error(f"{self.architecture}.{key}", problem)


def read_config(checkpoint: GGUFCheckpoint, beside: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config.json of the model in the file, in the terms of transformers.

    `beside` is the config.json in the file's folder. If it describes the model, it is used, except for what the tensors
    say: the size of the vocabulary, whether embeddings are tied, and the type of the weights.

    Raises:
        ValueError: the architecture is not supported, or an entry is missing or wrong.
    """
    metadata = _Metadata(checkpoint)
    if metadata.architecture not in ARCHITECTURES:
        raise metadata.header.error(
            "general.architecture",
            f"is {metadata.architecture!r}, which is not supported; supported: {', '.join(sorted(ARCHITECTURES))}",
        )
    given = text_config(beside or {})
    # Some repositories have a config.json with nothing but a model_type.
    describes = "hidden_size" in given or "n_embd" in given
    config = given if describes else _decoder(metadata)
    config = {key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype")}
    return (
        config
        | _quantization(checkpoint)
        | {
            "vocab_size": _vocab_size(checkpoint),
            "tie_word_embeddings": not metadata.has_tensor("output.weight"),
            "dtype": _dtype(checkpoint),
            NORMS_HOLD_OFFSET: True,
        }
    )


def _quantization(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    """The quantization_config: the type that most bytes of packed weights have, and all types for people."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.type.name in PACKED_TYPES:
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.num_bytes
    if not sizes:
        return {}
    names = sorted(sizes, key=lambda name: -sizes[name])
    return {"quantization_config": {"quant_method": "gguf", "type": names[0], "summary": ", ".join(names)}}


def _dtype(checkpoint: GGUFCheckpoint) -> str:
    """The type of activations that fits the weights. A few bits and a scale are precise enough in bfloat16."""
    kinds = {tensor.type.name for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1}
    if kinds & set(PACKED_TYPES) or "BF16" in kinds:
        return "bfloat16"
    return "float16" if "F16" in kinds else "float32"


def _vocab_size(checkpoint: GGUFCheckpoint) -> int:
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError(f"{checkpoint.header.file} has no token_embd.weight, so it is no whole language model")
    return embedding.shape[0]


def _decoder(m: _Metadata) -> dict[str, Any]:
    """The keys that decoders share, and those of the architecture."""
    hidden, heads = m.integer("embedding_length"), m.integer("attention.head_count")
    shared: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": m.integer("block_count") - m.integer("nextn_predict_layers", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": m.integer("attention.head_count_kv", heads),
        "max_position_embeddings": m.integer("context_length"),
    }
    if ends := end_token_ids(m.header):
        shared["eos_token_id"] = list(ends)
    if m.has("feed_forward_length"):
        shared["intermediate_size"] = m.integer("feed_forward_length")
    if m.has("attention.layer_norm_rms_epsilon"):
        shared["rms_norm_eps"] = _rounded(m.number("attention.layer_norm_rms_epsilon"))
    if m.has("attention.key_length"):
        shared["head_dim"] = m.integer("attention.key_length")
    if m.has("rope.freq_base"):
        shared["rope_theta"] = m.number("rope.freq_base")
    if scaling := _rope_scaling(m):
        shared["rope_scaling"] = scaling
    return shared | ARCHITECTURES[m.architecture](m)


def _rounded(value: float) -> float:
    """A number that the file holds as float32, as the shortest decimal that is the same float32."""
    return float(str(np.float32(value)))


def _rope_scaling(m: _Metadata) -> dict[str, Any] | None:
    """The scaling of rope. Factors of each frequency, which Llama 3's files have as a tensor, are a long rope of one
    length."""
    kind = m.text("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": m.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": m.number("rope.scaling.factor")}
        for key, own in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if m.has(f"rope.scaling.{own}"):
                scaling[key] = m.number(f"rope.scaling.{own}")
        if m.has("rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = m.integer("rope.scaling.original_context_length")
        return scaling
    if kind not in ("none", "longrope"):
        raise m.header.error(f"{m.architecture}.rope.scaling.type", f"is {kind!r}, which is not supported")
    if (factors := m.factors("rope_freqs.weight")) is not None:
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    short, long = m.factors("rope_factors_short.weight"), m.factors("rope_factors_long.weight")
    if short is None or long is None:
        return None
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    if m.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = m.integer("rope.scaling.original_context_length")
    if m.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = m.number("rope.scaling.attn_factor")
    return scaling


def _llama(m: _Metadata) -> dict[str, Any]:
    head_dim = m.integer("attention.key_length", m.integer("rope.dimension_count", 0)) or None
    own: dict[str, Any] = {} if head_dim is None else {"head_dim": head_dim}
    if m.integer("expert_count", 0):
        return own | _experts(m, "num_local_experts") | {"model_type": "mixtral", "sliding_window": None}
    return own | {"model_type": "llama", **_biases(m)}


def _biases(m: _Metadata) -> dict[str, Any]:
    return {
        "attention_bias": m.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": m.has_tensor("blk.0.ffn_gate.bias"),
    }


def _experts(m: _Metadata, count_key: str) -> dict[str, Any]:
    return {count_key: m.integer("expert_count"), "num_experts_per_tok": m.integer("expert_used_count")}


def _mistral3(m: _Metadata) -> dict[str, Any]:
    if not m.has("attention.temperature_scale"):  # the language model of Mistral Small 3
        return {"model_type": "mistral", "sliding_window": None}
    rope = (_rope_scaling(m) or {"rope_type": "default"}) | {"rope_theta": m.number("rope.freq_base", 1e6)}
    rope["llama_4_scaling_beta"] = _rounded(m.number("attention.temperature_scale"))
    if m.has("rope.scaling.yarn_log_multiplier"):
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), m.number("rope.scaling.yarn_log_multiplier"))
    return {"model_type": "ministral3", "rope_parameters": rope, "rope_scaling": None, "sliding_window": None}


def _granite(m: _Metadata) -> dict[str, Any]:
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    multipliers = {name: _rounded(m.number(key)) for name, key in keys.items() if m.has(key)}
    return {"model_type": "granite", **_biases(m), **multipliers}


def _smollm3(m: _Metadata) -> dict[str, Any]:
    # The file does not say which layers have no rope: every fourth, in the one model of this architecture.
    return {"model_type": "smollm3", "no_rope_layer_interval": 4, **_biases(m)}


def _qwen2(m: _Metadata) -> dict[str, Any]:
    return {"model_type": "qwen2"}


def _qwen3(m: _Metadata) -> dict[str, Any]:
    return {"model_type": "qwen3"}


def _qwen2_moe(m: _Metadata) -> dict[str, Any]:
    own = {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": m.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": m.flag("expert_weights_norm", False),
    }
    return own | _experts(m, "num_experts")


def _qwen3_moe(m: _Metadata) -> dict[str, Any]:
    own = {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "norm_topk_prob": m.flag("expert_weights_norm", True),
    }
    return own | _experts(m, "num_experts")


def _gemma(m: _Metadata) -> dict[str, Any]:
    return {"model_type": "gemma"}


def _query_scale(m: _Metadata, big_layers: int) -> int:
    """query_pre_attn_scalar, which files leave out: the head size, but hidden size / heads in the 27B models."""
    heads = m.integer("attention.head_count")
    if m.integer("block_count") == big_layers:
        return m.integer("embedding_length") // heads
    return m.integer("attention.key_length")


def _gemma2(m: _Metadata) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        "query_pre_attn_scalar": _query_scale(m, 46),
        "sliding_window": m.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": m.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": m.number("final_logit_softcapping", 30.0),
    }


def _gemma3(m: _Metadata) -> dict[str, Any]:
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


def _phi3(m: _Metadata) -> dict[str, Any]:
    head_dim = m.integer("embedding_length") // m.integer("attention.head_count")
    return {
        "model_type": "phi3",
        "sliding_window": m.integer("attention.sliding_window", 0) or None,
        "partial_rotary_factor": m.integer("rope.dimension_count", head_dim) / head_dim,
        "original_max_position_embeddings": m.integer(
            "rope.scaling.original_context_length", m.integer("context_length")
        ),
    }


def _gpt_oss(m: _Metadata) -> dict[str, Any]:
    own = {
        "model_type": "gpt_oss",
        "intermediate_size": m.integer("expert_feed_forward_length"),
        "sliding_window": m.integer("attention.sliding_window"),
    }
    if (scaling := _rope_scaling(m)) is not None:
        own["rope_scaling"] = scaling | {"truncate": False}
    return own | _experts(m, "num_local_experts")


def _gpt2(m: _Metadata) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": m.integer("embedding_length"),
        "n_head": m.integer("attention.head_count"),
        "n_layer": m.integer("block_count"),
        "n_positions": m.integer("context_length"),
        "n_inner": m.integer("feed_forward_length"),
        "layer_norm_epsilon": _rounded(m.number("attention.layer_norm_epsilon")),
    }


def _deepseek2(m: _Metadata) -> dict[str, Any]:
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
        "routed_scaling_factor": _rounded(m.number("expert_weights_scale", 1.0)),
        "norm_topk_prob": m.flag("expert_weights_norm", False),
        "scoring_func": "sigmoid" if gating == _SIGMOID else "softmax",
        "n_group": groups,
        "topk_group": m.integer("expert_group_used_count", 1),
        "topk_method": "noaux_tc" if gating == _SIGMOID else "group_limited_greedy" if groups > 1 else "greedy",
    }
    scaling = _rope_scaling(m)
    if scaling is not None and scaling["rope_type"] == "yarn" and m.has("rope.scaling.yarn_log_multiplier"):
        # The file holds a tenth of the number.
        mscale = _rounded(10 * m.number("rope.scaling.yarn_log_multiplier"))
        own["rope_scaling"] = scaling | {"mscale": mscale, "mscale_all_dim": mscale}
    return own


def _llama4(m: _Metadata) -> dict[str, Any]:
    if m.integer("attention.sliding_window", _LLAMA4_CHUNK) == 0:
        raise m.header.error("llama4.attention.sliding_window", "is 0 (no chunks), which is not supported")
    whole = m.integer("embedding_length") // m.integer("attention.head_count")
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


def _sigmoid_experts(m: _Metadata, count_key: str) -> dict[str, Any]:
    """Routing as in DeepSeek V3, without groups."""
    gating = m.integer("expert_gating_func", _SIGMOID)
    if gating != _SIGMOID:
        raise m.header.error(f"{m.architecture}.expert_gating_func", f"is {gating}, which is not supported")
    return _experts(m, count_key) | {"norm_topk_prob": m.flag("expert_weights_norm", True)}


def _glm4_moe(m: _Metadata) -> dict[str, Any]:
    head_dim = m.integer("attention.key_length")
    own = {
        "model_type": "glm4_moe",
        "partial_rotary_factor": m.integer("rope.dimension_count") / head_dim,
        "attention_bias": m.has_tensor("blk.0.attn_q.bias"),
        "use_qk_norm": m.has_tensor("blk.0.attn_q_norm.weight"),
        "first_k_dense_replace": m.integer("leading_dense_block_count", 0),
        "n_shared_experts": m.integer("expert_shared_count", 0),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
        "routed_scaling_factor": _rounded(m.number("expert_weights_scale", 1.0)),
        "n_group": 1,
        "topk_group": 1,
    }
    return own | _sigmoid_experts(m, "n_routed_experts")


def _minimax_m2(m: _Metadata) -> dict[str, Any]:
    own = {
        "model_type": "minimax_m2",
        "intermediate_size": m.integer("expert_feed_forward_length"),
        "rotary_dim": m.integer("rope.dimension_count"),
    }
    return own | _sigmoid_experts(m, "num_local_experts")


ARCHITECTURES: Mapping[str, Callable[[_Metadata], dict[str, Any]]] = {
    "deepseek2": _deepseek2,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "granite": _granite,
    "llama": _llama,
    "llama4": _llama4,
    "minimax-m2": _minimax_m2,
    "mistral3": _mistral3,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "smollm3": _smollm3,
}
