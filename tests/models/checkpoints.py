"""Tiny random checkpoints of every model type, made by transformers itself."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from shardline.models.parameters import parameters
from shardline.models.spec import DecoderSpec

if TYPE_CHECKING:
    import torch
    import transformers
    from torch import nn

    from shardline.runtime.loader.weights import WeightSource

_TOKENS = {"bos_token_id": 1, "eos_token_id": 3, "pad_token_id": 0}
_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 104,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    **_TOKENS,
}
_GEMMA = {**_SHAPE, "head_dim": 20}
_DEEPSEEK = {
    **_SHAPE,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
    "q_lora_rank": 40,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_INDEXER = {"index_n_heads": 12, "index_head_dim": 20, "index_topk": 11}
_HYBRID = {
    **_SHAPE,
    "num_hidden_layers": 5,
    "head_dim": 24,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention", "full_attention"],
}
_EXPERTS = {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}
_GROWING_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_GROWING_YARN_OF_OLMO = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_GLM = {
    **_SHAPE,
    "head_dim": 24,
    "n_routed_experts": 12,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "use_qk_norm": True,
}
_NEMOTRON_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_GEMMA_4_KINDS = {"s": "sliding_attention", "f": "full_attention"}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SHAPE),
    "mistral": ("MistralConfig", {**_SHAPE, "head_dim": 24, "sliding_window": 8}),
    "qwen2": ("Qwen2Config", _SHAPE),
    "qwen3": ("Qwen3Config", {**_SHAPE, "head_dim": 24}),
    "gemma": ("GemmaConfig", _GEMMA),
    "gemma2": ("Gemma2Config", {**_GEMMA, "sliding_window": 8, "query_pre_attn_scalar": 30}),
    "gemma3_text": (
        "Gemma3TextConfig",
        {**_GEMMA, "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 30},
    ),
    "phi3": ("Phi3Config", _SHAPE),
    "mixtral": (
        "MixtralConfig",
        {**_SHAPE, "intermediate_size": 56, "num_local_experts": 9, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_SHAPE, **_EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_SHAPE, **_EXPERTS, "head_dim": 24, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": 256,
            "n_embd": 64,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 256,
            "layer_norm_epsilon": 1e-3,
            **_TOKENS,
        },
    ),
    "deepseek_v2": ("DeepseekV2Config", {**_DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK),
    "deepseek_v32": ("DeepseekV32Config", {**_DEEPSEEK, **_INDEXER}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**_DEEPSEEK, **_INDEXER, "index_topk_freq": 2, "index_skip_topk_offset": 3}),
    "qwen3_5_text": ("Qwen3_5TextConfig", _HYBRID),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        {**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 48},
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {
            **_SHAPE,
            "layer_types": [_GEMMA_4_KINDS[kind] for kind in "fssf"],
            "head_dim": 24,
            "v_head_dim": 14,
            "num_key_value_heads": 1,
            "sliding_window": 8,
            "n_routed_experts": 9,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.7,
            "attention_value_scale": 0.6,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **{key: value for key, value in _SHAPE.items() if key not in ("num_hidden_layers", "rms_norm_eps")},
            "layer_norm_epsilon": 1e-3,
            "layers_block_type": [_NEMOTRON_KINDS[letter] for letter in "ME*-MM-*E"],
            "head_dim": 24,
            "ssm_state_size": 20,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 4,
            "conv_kernel": 3,
            "time_step_min": 1e-9,  # transformers bounds steps from below, but only those of prompts
            "n_routed_experts": 9,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 1.7,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_SHAPE,
            "intermediate_size": 40,
            "num_local_experts": 9,
            "num_experts_per_tok": 3,
            "head_dim": 24,
            "sliding_window": 8,
            "rope_parameters": _GPT_OSS_ROPE,
        },
    ),
    "llama4_text": (
        "Llama4TextConfig",
        {
            **_SHAPE,
            "intermediate_size": 40,
            "intermediate_size_mlp": 104,
            "num_local_experts": 9,
            "num_experts_per_tok": 1,
            "head_dim": 24,
            "attention_chunk_size": 10,
            "floor_scale": 7,
            "interleave_moe_layer_step": 2,
        },
    ),
    "ministral3": ("Ministral3Config", {**_SHAPE, "head_dim": 24, "rope_parameters": _GROWING_YARN}),
    "mistral4": (
        "Mistral4Config",
        {**_DEEPSEEK, "num_key_value_heads": 4, "rope_parameters": {**_GROWING_YARN, "partial_rotary_factor": 0.4}},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**_GLM, "first_k_dense_replace": 1, "moe_intermediate_size": 24, "routed_scaling_factor": 1.7},
    ),
    "glm4": ("Glm4Config", {**_SHAPE, "head_dim": 24}),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            **_SHAPE,
            "intermediate_size": 40,
            "num_local_experts": 9,
            "num_experts_per_tok": 3,
            "head_dim": 24,
            "rotary_dim": 12,
        },
    ),
    "olmo2": ("Olmo2Config", _SHAPE),
    "olmo3": ("Olmo3Config", {**_SHAPE, "sliding_window": 8, "rope_scaling": _GROWING_YARN_OF_OLMO}),
    "granite": (
        "GraniteConfig",
        {
            **_SHAPE,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.3,
        },
    ),
    "cohere2": (
        "Cohere2Config",
        {**_SHAPE, "sliding_window": 8, "layer_norm_eps": 1e-3, "logit_scale": 0.7},
    ),
    "smollm3": ("SmolLM3Config", _SHAPE),
    "ernie4_5": ("Ernie4_5Config", {**_SHAPE, "head_dim": 24}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {**_SHAPE, "moe_num_experts": 9, "moe_k": 3, "moe_intermediate_size": 40},
    ),
    "seed_oss": ("SeedOssConfig", {**_SHAPE, "head_dim": 24}),
    "exaone4": ("Exaone4Config", {**_SHAPE, "sliding_window": 8}),
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            **_SHAPE,
            "num_hidden_layers": 7,
            "head_dim": 12,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 10,
            "vocab_size_per_layer_input": 256,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "layer_types": [_GEMMA_4_KINDS[kind] for kind in "sssffsf"],
            "enable_moe_block": True,
            "num_experts": 9,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    ),
}
FAMILIES = tuple(_CONFIGS)
LIKE_OTHERS = (
    "ministral3",
    "mistral4",
    "glm4_moe",
    "glm4",
    "olmo2",
    "smollm3",
    "ernie4_5",
    "ernie4_5_moe",
    "seed_oss",
    "exaone4",
    "qwen3_5_moe_text",
)
"""Families that consist of parts of other families. Tests of combinations leave them out."""
OWN_PARTS = (
    "gpt_oss",
    "llama4_text",
    "mistral4",
    "minimax_m2",
    "olmo3",
    "granite",
    "cohere2",
    "gemma4_text",
    "qwen3_5_text",
    "nemotron_h",
    "mimo_v2_flash",
)
"""Families with a part that no other family has. A few combinations of them are tested."""


def has_experts(family: str) -> bool:
    """Whether the family's models are mixtures of experts."""
    values = _CONFIGS[family][1]
    return bool({"num_experts_per_tok", "moe_k", "top_k_experts"} & values.keys())


class Variant(NamedTuple):
    """A configuration that takes another path than the family's plain one."""

    family: str
    overrides: dict[str, Any]
    prompt_len: int = 40
    """For lengths that matter to the rope scaling; max_model_len is to be the same."""


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **values}}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
_LLAMA3_ROPE = _LLAMA3["rope_parameters"]
_LONGROPE = {
    **_rope(
        "longrope",
        short_factor=[1.0 + 0.05 * i for i in range(8)],
        long_factor=[1.0 + 0.9 * i for i in range(8)],
        original_max_position_embeddings=32,
    ),
    "original_max_position_embeddings": 32,
}
_NARROW_LONGROPE = {
    "original_max_position_embeddings": 32,
    **_rope(
        "longrope",
        short_factor=[1.0] * 6,
        long_factor=[1.5] * 6,
        original_max_position_embeddings=32,
        partial_rotary_factor=0.75,
    ),
}
_YARN_MSCALE = _rope(
    "yarn",
    factor=4.0,
    original_max_position_embeddings=64,
    mscale=0.8,
    mscale_all_dim=0.4,
    beta_fast=16.0,
    beta_slow=2.0,
)
VARIANTS: dict[str, Variant] = {
    **{family: Variant(family, {}) for family in FAMILIES},
    "llama-biased": Variant("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-gelu": Variant("llama", {"hidden_act": "gelu", "num_key_value_heads": 1, "head_dim": 12}),
    "llama-relu": Variant("llama", {"hidden_act": "relu", "num_key_value_heads": 4}),
    "llama-linear": Variant("llama", _rope("linear", factor=4.0)),
    "llama-dynamic-long": Variant("llama", {**_rope("dynamic", factor=3.0), "max_position_embeddings": 32}, 48),
    "llama-dynamic-short": Variant("llama", {**_rope("dynamic", factor=3.0), "max_position_embeddings": 64}),
    "llama-llama3": Variant("llama", _LLAMA3),
    "llama-yarn": Variant("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-yarn-mscale": Variant(
        "llama",
        _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            mscale=0.8,
            mscale_all_dim=0.4,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
        ),
    ),
    "llama-longrope": Variant("llama", _LONGROPE),
    "mistral-full": Variant("mistral", {"sliding_window": None, "head_dim": None}),
    "qwen2-window": Variant("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen2-tied-yarn": Variant(
        "qwen2",
        {"tie_word_embeddings": True, **_rope("yarn", factor=4.0, original_max_position_embeddings=64)},
    ),
    "qwen3-biased-window": Variant(
        "qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "gemma-untied": Variant("gemma", {"tie_word_embeddings": False, "attention_bias": True}),
    "gemma2-capless": Variant("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": None}),
    "gemma2-small-caps": Variant("gemma2", {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5}),
    "gemma3_text-capped": Variant(
        "gemma3_text",
        {
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            },
        },
    ),
    "nemotron_h-latent": Variant("nemotron_h", {"moe_latent_size": 36, "use_conv_bias": False}),
    "phi3-window": Variant("phi3", {"sliding_window": 7}),
    "phi3-longrope-short": Variant("phi3", _LONGROPE, 30),
    "phi3-longrope-long": Variant("phi3", _LONGROPE, 48),
    "phi3-partial": Variant("phi3", _NARROW_LONGROPE, 48),
    "deepseek_v2-q-lora-yarn": Variant("deepseek_v2", {"q_lora_rank": 24, "mlp_bias": True, **_YARN_MSCALE}),
    "deepseek_v2-biased-groups": Variant(
        "deepseek_v2", {"attention_bias": True, "v_head_dim": 20, "topk_method": "group_limited_greedy"}
    ),
    "deepseek_v3-yarn": Variant("deepseek_v3", {**_YARN_MSCALE, "attention_bias": True, "norm_topk_prob": False}),
    "deepseek_v3-halves": Variant(
        "deepseek_v3",
        {
            "rope_interleave": False,
            "q_lora_rank": None,
            "tie_word_embeddings": True,
            "first_k_dense_replace": 9,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "mixtral-window": Variant("mixtral", {"sliding_window": 7, "num_experts_per_tok": 1}),
    "qwen2_moe-window": Variant(
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 3,
            "qkv_bias": False,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
    ),
    "qwen3_moe-biased-window": Variant(
        "qwen3_moe",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss-full": Variant("gpt_oss", {"layer_types": ["full_attention"] * 4, "attention_bias": False}),
    "llama4_text-plain": Variant(
        "llama4_text",
        {"use_qk_norm": False, "attn_temperature_tuning": False, "moe_layers": [], "rope_parameters": _LLAMA3_ROPE},
    ),
    "mistral4-direct": Variant(
        "mistral4", {"q_lora_rank": None, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
    ),
    "glm4_moe-plain": Variant(
        "glm4_moe", {"use_qk_norm": False, "attention_bias": True, "n_group": 1, "topk_group": 1}
    ),
    "minimax_m2-one-group": Variant("minimax_m2", {"num_key_value_heads": 1}),
    "olmo2-biased": Variant("olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    "granite-biased": Variant("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "smollm3-window": Variant(
        "smollm3", {"use_sliding_window": True, "sliding_window": 6, "no_rope_layers": [1, 0, 0, 1]}
    ),
    "ernie4_5-biased": Variant("ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
    "ernie4_5_moe-plain": Variant(
        "ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "moe_layer_end_index": 2}
    ),
    "gemma4_text-dense": Variant(
        "gemma4_text",
        {
            "enable_moe_block": False,
            "attention_k_eq_v": False,
            "final_logit_softcapping": 3.0,
            "head_dim": 20,
            "num_hidden_layers": 3,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "exaone4-full": Variant("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "gpt2-scaled": Variant("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 72}),
    "gpt2-unscaled": Variant(
        "gpt2", {"scale_attn_weights": False, "activation_function": "relu", "tie_word_embeddings": False}
    ),
}


@functools.cache
def _library() -> ModuleType:
    """transformers, which takes two seconds, of those tests only that need it."""
    import transformers

    # It has the class, but not in its table.
    auto = transformers.AutoModelForCausalLM
    auto.register(transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True)
    return transformers


def make_config(family: str, **overrides: Any) -> transformers.PreTrainedConfig:
    """The family's tiny configuration: 4 heads, 4 layers (gemma3_text: 7), hidden size 64, 256 tokens."""
    name, values = _CONFIGS[family]
    config: transformers.PreTrainedConfig = getattr(_library(), name)(**{**values, **overrides})
    return config


def make_model(family: str, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """A float32 model with weights so large that every part of it shows in the logits."""
    config = make_config(family, **overrides)
    model: transformers.PreTrainedModel = _library().AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    randomize(model, seed)
    return model.eval()


def randomize(model: nn.Module, seed: int) -> None:
    """Draw the weights of a model."""
    import torch
    from torch import nn

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                values = torch.randn(parameter.shape, generator=generator)
                if isinstance(module, nn.Embedding):
                    values *= 0.3
                elif name == "e_score_correction_bias":
                    values *= 0.2
                elif name.endswith("_bias"):  # biases of stacked experts
                    values *= 0.3
                elif parameter.dim() >= 2:
                    values *= parameter.shape[-1] ** -0.5
                elif name in ("bias", "sinks"):  # sinks are not initialized
                    values *= 0.2
                else:
                    # A norm's weight: spread around what it was made with, 1 or 0.
                    values = values * 0.2 + parameter
                parameter.copy_(values)
            for name, buffer in module.named_buffers(recurse=False):
                if name == "e_score_correction_bias":
                    buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
                if name == "layer_scalar":
                    buffer.copy_(1 + torch.randn(buffer.shape, generator=generator) * 0.2)


def make_checkpoint(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Save a tiny random checkpoint of `family` in `folder`; `overrides` change its configuration.

    Same arguments, same bytes. With a `max_shard_size` like "60KB" there are several files and an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _checkpoint_files(family, seed, dtype, max_shard_size, json.dumps(overrides)).items():
        (folder / name).write_bytes(content)
    return folder


@functools.lru_cache(maxsize=32)
def _checkpoint_files(family: str, seed: int, dtype: str, max_shard_size: str, overrides: str) -> Mapping[str, bytes]:
    """Files by their names; kept, since many tests want the same ones."""
    import torch

    model = make_model(family, seed, **json.loads(overrides)).to(getattr(torch, dtype))
    model.config.dtype = dtype
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def make_classifier(family: str, folder: Path, num_labels: int, **overrides: Any) -> Path:
    """Save a tiny random checkpoint of `family` with a head for `num_labels` labels."""
    config = make_config(family, num_labels=num_labels, dtype="float32", **overrides)
    model = _library().AutoModelForSequenceClassification.from_config(config)
    randomize(model, 0)
    model.save_pretrained(folder)
    return folder


def make_variant(name: str, folder: Path, **options: Any) -> Path:
    """Save the checkpoint of a variant by its name in VARIANTS."""
    variant = VARIANTS[name]
    return make_checkpoint(variant.family, folder, **{**variant.overrides, **options})


def whole_tensors(weights: WeightSource, spec: DecoderSpec) -> dict[str, torch.Tensor]:
    """Every parameter of a model, unsharded."""
    return {name: weights.get(name, (None,) * len(shape)) for name, shape in parameters(spec)}
