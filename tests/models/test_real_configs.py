"""config.json files as they are on the hub, older and newer style, against what transformers makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from shardline.checkpoints.lookup import decoder_spec
from shardline.models.attention import GQA
from shardline.models.feed_forward import Dense, MoE, Routing
from shardline.models.mla import MLA
from shardline.models.parts import Rope
from shardline.models.spec import DecoderSpec

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
DEEPSEEK_V2 = {"model_type": "deepseek_v2", "first_k_dense_replace": 1, "hidden_size": 5120, "intermediate_size": 12288,
               "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1536,
               "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2,
               "norm_topk_prob": False, "num_attention_heads": 128, "num_experts_per_tok": 6, "num_hidden_layers": 60,
               "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
               "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
                                "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"},
               "rope_theta": 10000, "routed_scaling_factor": 16.0, "scoring_func": "softmax", "topk_group": 3,
               "topk_method": "group_limited_greedy", "torch_dtype": "bfloat16", "v_head_dim": 128,
               "vocab_size": 102400}  # fmt: skip
DEEPSEEK_V2_LITE = {**DEEPSEEK_V2, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
                    "n_group": 1, "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27,
                    "num_key_value_heads": 16, "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1,
                    "topk_method": "greedy"}  # fmt: skip
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168,
               "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
               "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
               "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
               "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
               "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
               "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                                "original_max_position_embeddings": 4096, "type": "yarn"},
               "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,
               "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "v_head_dim": 128,
               "vocab_size": 129280}  # fmt: skip
MIXTRAL_8X7B = {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
                "num_experts_per_tok": 2, "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
                "sliding_window": None, "torch_dtype": "bfloat16", "vocab_size": 32000}  # fmt: skip
QWEN_15_MOE_A27B = {"model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_size": 2048,
                    "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
                    "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16,
                    "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16,
                    "rope_theta": 1000000.0, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
                    "use_sliding_window": False, "torch_dtype": "bfloat16", "vocab_size": 151936}  # fmt: skip
QWEN_3_30B_A3B = {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
                  "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
                  "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
                  "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
                  "num_key_value_heads": 4, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
                  "use_sliding_window": False, "torch_dtype": "bfloat16", "vocab_size": 151936}  # fmt: skip
GPT_OSS_20B = {"model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "hidden_size": 2880,
               "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
               "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
               "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                                "original_max_position_embeddings": 4096, "truncate": False},
               "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "torch_dtype": "bfloat16",
               "vocab_size": 201088}  # fmt: skip
LLAMA_4_SCOUT = {"model_type": "llama4_text", "attention_chunk_size": 8192, "hidden_size": 5120,
                 "interleave_moe_layer_step": 1, "max_position_embeddings": 10485760, "no_rope_layers": [],
                 "num_hidden_layers": 48, "num_local_experts": 16, "rope_theta": 500000.0,
                 "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                                  "original_max_position_embeddings": 8192, "rope_type": "llama3"},
                 "torch_dtype": "bfloat16", "use_qk_norm": True, "vocab_size": 202048}  # fmt: skip
MINIMAX_M2 = {"model_type": "minimax_m2", "head_dim": 128, "hidden_size": 3072, "intermediate_size": 1536,
              "max_position_embeddings": 196608, "num_attention_heads": 48, "num_experts_per_tok": 8,
              "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "qk_norm_type": "per_layer",
              "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
              "torch_dtype": "bfloat16", "use_qk_norm": True, "use_routing_bias": True,
              "vocab_size": 200064}  # fmt: skip
GLM_4_5_AIR = {"model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128,
               "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
               "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
               "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
               "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 1000000,
               "routed_scaling_factor": 1.0, "topk_group": 1, "torch_dtype": "bfloat16", "use_qk_norm": False,
               "vocab_size": 151552}  # fmt: skip
OLMO_3_7B = {"model_type": "olmo3", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 65536,
             "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
             "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
                              "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn"},
             "rope_theta": 500000, "sliding_window": 4096, "torch_dtype": "bfloat16",
             "vocab_size": 100278}  # fmt: skip
COMMAND_R7B = {"model_type": "cohere2", "head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336,
               "layer_norm_eps": 1e-05, "logit_scale": 0.25, "max_position_embeddings": 132096,
               "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_scaling": None,
               "rope_theta": 50000, "sliding_window": 4096, "sliding_window_pattern": 4, "torch_dtype": "bfloat16",
               "vocab_size": 256000}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    name: value for name, value in globals().items() if isinstance(value, dict) and "model_type" in value
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("max_model_len", [None, 4096, 5000])
def test_older_files_mean_what_transformers_makes_of_them(name: str, max_model_len: int | None) -> None:
    config = CONFIGS[name]
    values = _copy(config)
    newer = transformers.AutoConfig.for_model(values.pop("model_type"), **values).to_dict()
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


def _rope(spec: DecoderSpec, layer: int = 0) -> Rope:
    attention = spec.layers[layer].attention
    assert isinstance(attention, GQA)
    assert attention.positions.rope is not None
    return attention.positions.rope


def test_max_model_len_chooses_the_long_factors() -> None:
    def frequencies(max_model_len: int | None) -> tuple[float, ...]:
        return _rope(_spec("PHI_3_128K", max_model_len)).inv_freq

    assert frequencies(1) == frequencies(4096) != frequencies(4097) == frequencies(None)


def test_the_first_name_of_longrope_still_works() -> None:
    older = {**PHI_3_128K, "rope_scaling": {"type": "su", **_LONG_FACTORS}}
    assert decoder_spec(older) == _spec("PHI_3_128K")


def test_gemma3_has_five_windowed_layers_to_a_full_one() -> None:
    spec = _spec("GEMMA_3_SCALED")
    assert [layer.attention.window for layer in spec.layers[:7]] == [512, 512, 512, 512, 512, None, 512]
    full, windowed = _rope(spec, 5), _rope(spec)
    assert full.inv_freq[0] == 1 / 8
    assert windowed.inv_freq[0] == 1.0


def test_deepseek_scores_have_yarns_mscale() -> None:
    """Real values: 192^-0.5 times the square of 0.1 * 0.707 * ln 40 + 1, or of 0.1 * ln 40 + 1."""
    for name, mscale in (("DEEPSEEK_V2", 1.2608037), ("DEEPSEEK_V2_LITE", 1.2608037), ("DEEPSEEK_V3", 1.3688879)):
        spec = _spec(name)
        mla = spec.layers[0].attention
        assert isinstance(mla, MLA)
        assert mla.score.scale == pytest.approx(192**-0.5 * mscale**2)
        assert mla.positions.rope is not None
        assert mla.positions.rope.attention_scaling == 1.0
        assert mla.positions.rope.interleaved
        assert spec.max_position_embeddings == 163840


def test_deepseek_routes_by_groups() -> None:
    large, lite, third = (
        _spec(name).layers[-1].feed_forward for name in ("DEEPSEEK_V2", "DEEPSEEK_V2_LITE", "DEEPSEEK_V3")
    )
    assert isinstance(large, MoE)
    assert large.routing == Routing(160, 6, normalized=False, scale=16.0, num_groups=8, top_groups=3)
    assert large.shared == Dense(3072, "silu")
    assert isinstance(lite, MoE)
    assert lite.routing == Routing(64, 6, normalized=False)
    assert isinstance(third, MoE)
    assert third.routing == Routing(
        256, 8, "sigmoid", scale=2.5, num_groups=8, top_groups=4, group_score="top2_sum", correction_bias=True
    )
    assert [isinstance(layer.feed_forward, Dense) for layer in _spec("DEEPSEEK_V3").layers[:4]] == [True] * 3 + [False]


def test_frequencies_are_those_of_transformers_bit_for_bit() -> None:
    config = transformers.LlamaConfig(**_copy(LLAMA_3_1_8B))
    expected = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq.tolist()
    assert list(_rope(_spec("LLAMA_3_1_8B")).inv_freq) == expected
