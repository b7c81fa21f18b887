"""config.json files as they are on the hub, older and newer style, against what transformers makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from shardline.models.lookup import decoder_spec
from shardline.models.spec import DecoderSpec

_CONFIG_CLASSES: dict[str, type[transformers.PreTrainedConfig]] = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma": transformers.GemmaConfig,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "phi3": transformers.Phi3Config,
    "gpt2": transformers.GPT2Config,
}
_LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_3_1_8B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": _LLAMA3_ROPE,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN_2_5_7B_YARN = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    "sliding_window": 131072,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}
QWEN_3_06B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA_2B = {"model_type": "gemma", "hidden_act": "gelu", "hidden_size": 2048, "num_attention_heads": 8,
            "num_key_value_heads": 1, "num_hidden_layers": 18, "intermediate_size": 16384, "rope_theta": 10000.0,
            "torch_dtype": "bfloat16"}  # fmt: skip
GEMMA_2_9B = {"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
              "num_attention_heads": 16, "num_key_value_heads": 8, "query_pre_attn_scalar": 256, "sliding_window": 4096,
              "hidden_act": "gelu_pytorch_tanh", "torch_dtype": "float32"}  # fmt: skip
GEMMA_3_1B = {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
              "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512, "rope_theta": 1000000,
              "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window_pattern": 6, "vocab_size": 262144,
              "attn_logit_softcapping": None, "torch_dtype": "bfloat16"}  # fmt: skip
GEMMA_3_SCALED = {**GEMMA_3_1B, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
_LONG_FACTORS = {"short_factor": [1.05] * 48, "long_factor": [1.03 + i for i in range(48)]}
PHI_3_128K = {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 131072,
              "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "sliding_window": 262144,
              "rope_scaling": {"type": "longrope", **_LONG_FACTORS}, "attention_bias": False,
              "torch_dtype": "bfloat16", "vocab_size": 32064}  # fmt: skip
PHI_4_MINI = {**PHI_3_128K, "partial_rotary_factor": 0.75, "num_attention_heads": 24, "num_key_value_heads": 8,
              "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
              "tie_word_embeddings": True}  # fmt: skip
GPT2 = {"model_type": "gpt2", "activation_function": "gelu_new", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
        "n_layer": 12, "n_positions": 1024, "layer_norm_epsilon": 1e-05, "vocab_size": 50257}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    name: value for name, value in globals().items() if isinstance(value, dict) and "model_type" in value
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("max_model_len", [None, 4096, 5000])
def test_older_files_mean_what_transformers_makes_of_them(name: str, max_model_len: int | None) -> None:
    config = CONFIGS[name]
    config_class = _CONFIG_CLASSES[config["model_type"]]
    newer = config_class(**_copy(config)).to_dict()
    assert "rope_parameters" in newer or config["model_type"] == "gpt2"
    assert "rope_scaling" not in newer
    assert decoder_spec(config, max_model_len) == decoder_spec(newer, max_model_len)


def _copy(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with dicts that transformers may change; it takes `dtype` for `torch_dtype`."""
    copied = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    if "torch_dtype" in copied:
        copied["dtype"] = copied.pop("torch_dtype")
    return copied


def _spec(name: str, max_model_len: int | None = None) -> DecoderSpec:
    return decoder_spec(CONFIGS[name], max_model_len)


def test_lengths_count_the_rope_scaling() -> None:
    assert _spec("LLAMA_3_1_8B").max_position_embeddings == 131072
    assert _spec("QWEN_2_5_7B_YARN").max_position_embeddings == 131072
    assert _spec("PHI_3_128K").max_position_embeddings == 131072
    assert _spec("GEMMA_3_SCALED").max_position_embeddings == 131072
    linear = {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert decoder_spec(linear).max_position_embeddings == 8192


def test_max_model_len_chooses_the_long_factors() -> None:
    def frequencies(max_model_len: int | None) -> tuple[float, ...]:
        rope = _spec("PHI_3_128K", max_model_len).layers[0].attention.rope
        assert rope is not None
        return rope.inv_freq

    assert frequencies(1) == frequencies(4096) != frequencies(4097) == frequencies(None)


def test_the_first_name_of_longrope_still_works() -> None:
    older = {**PHI_3_128K, "rope_scaling": {"type": "su", **_LONG_FACTORS}}
    assert decoder_spec(older) == _spec("PHI_3_128K")


def test_gemma3_has_five_windowed_layers_to_a_full_one() -> None:
    layers = _spec("GEMMA_3_SCALED").layers
    assert [layer.attention.window for layer in layers[:7]] == [512, 512, 512, 512, 512, None, 512]
    full, windowed = layers[5].attention.rope, layers[0].attention.rope
    assert full is not None
    assert windowed is not None
    assert full.inv_freq[0] == 1 / 8
    assert windowed.inv_freq[0] == 1.0


def test_frequencies_are_those_of_transformers_bit_for_bit() -> None:
    config = transformers.LlamaConfig(**_copy(LLAMA_3_1_8B))
    expected = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq.tolist()
    rope = _spec("LLAMA_3_1_8B").layers[0].attention.rope
    assert rope is not None
    assert list(rope.inv_freq) == expected
