"""Whatever is wrong with a config.json is a ValueError that names the key."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import pytest

from shardline.checkpoints.lookup import decoder_spec, family, known_families
from shardline.models.hf_config import HFConfig

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
_AWQ = {**_GPTQ, "quant_method": "awq"}
_AUTO_ROUND = {**_GPTQ, "quant_method": "auto-round"}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 64}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": "4096"}, "hidden_size must be a whole number, got '4096'"),
        ({"hidden_size": True}, "hidden_size must be a whole number"),
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"head_dim": 1 << 31}, "needs heads of at most 65536 elements, got 2147483648"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers must be at most 4096, got 1099511627776"),
        ({"model_type": "gpt2", "n_layer": 1 << 40}, "n_layer must be at most 4096"),
        ({"model_type": "mixtral", "num_local_experts": 1 << 40}, r"has 35184372088832 experts in 32 layers, and at"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be a whole number"),
        ({"num_attention_heads": 30}, "hidden_size must be a multiple of the 30 attention heads"),
        ({"num_key_value_heads": 5}, "num_key_value_heads must divide num_attention_heads"),
        ({"head_dim": 7}, "even rotary size, got 7"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be positive"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported; supported: silu"),
        ({"hidden_act": 3}, "hidden_act must be a string"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"torch_dtype": "int8"}, "torch_dtype 'int8' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config.bits is missing"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}},
            r"quant_algo 'W4A16_AWQ' is not supported; supported: NVFP4, FP8",
        ),
        ({"quantization_config": {**_GPTQ, "bits": 3}}, r"gptq with 3 bits is not supported, only 4 and 8"),
        (
            {"quantization_config": {**_GPTQ, "checkpoint_format": "marlin"}},
            r"checkpoint_format marlin is not supported",
        ),
        (
            {"quantization_config": {**_GPTQ, "quant_method": "awq", "version": "gemv"}},
            r"awq version gemv is not supported, only gemm",
        ),
        (
            {"quantization_config": {**_GPTQ, "quant_method": "awq", "version": "GEMV_FAST"}},
            r"awq version gemv_fast is not supported, only gemm",
        ),
        (
            {"quantization_config": {**_GPTQ, "quant_method": "awq", "backend": "llm-awq"}},
            r"awq with backend llm-awq is not supported, only autoawq",
        ),
        ({"quantization_config": {**_AWQ, "checkpoint_format": "gemv_fast"}}, r"awq version gemv_fast is not"),
        ({"quantization_config": {**_GPTQ, "is_marlin_format": True}}, r"checkpoint_format marlin is not supported"),
        (
            {"quantization_config": {**_AUTO_ROUND, "packing_format": "auto_round:llm_compressor"}},
            r"packing_format auto_round:llm_compressor is not supported, only those of GPTQ and AWQ",
        ),
        ({"quantization_config": {**_AUTO_ROUND, "data_type": "mx_fp"}}, r"with data_type mx_fp is not supported"),
        ({"quantization_config": {**_AUTO_ROUND, "act_bits": 8}}, r"activations of 8 bits \(act_bits\) is not"),
        ({"quantization_config": {**_AUTO_ROUND, "rotation_config": {"a": 1}}}, r"with rotations .* is not supported"),
        (
            {"quantization_config": {**_AUTO_ROUND, "extra_config": {"a.b": {"bits": "x"}}}},
            r"extra_config.a.b.bits must be a whole number, got 'x'",
        ),
        ({"quantization_config": {**_AUTO_ROUND, "extra_config": {"a.b": 3}}}, r"extra_config.a.b must be an object"),
        ({"quantization_config": {**_AUTO_ROUND, "extra_config": {"a(b": {}}}}, r"is no regular expression"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_scaling.rope_type 'spiral' is not supported; supported: default"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, "rope_parameters.factor must be positive"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 1e308}},
            r"rope_scaling.factor must be from 1e-20 to 1e\+15",
        ),
        ({"rope_theta": 10**30}, r"rope_theta must be from 1e-20 to 1e\+15, got 1000"),
        (
            {"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 2}},
            "parameters that do not fit each other",
        ),
        ({"vocab_size": 2**63}, "vocab_size must be at most 281474976710656, got 9223372036854775808"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "rope_parameters.low_freq_factor is missing"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
            "high_freq_factor must be at least",
        ),
        (
            {"rope_parameters": {**_LONGROPE, "original_max_position_embeddings": 9999}},
            "short_factor must be a list of",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 32}, "layer_types must be the same"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 32}, "sliding_window is not set"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types must name 32 layers"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 32}, "layer_types has 'chunked_attention'"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 5.0}, "attn_logit_softcapping 5.0"),
        ({"model_type": "phi3", "attention_bias": True}, "attention_bias True"),
        ({"model_type": "deepseek_v2"}, "num_experts_per_tok is missing"),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "norm_topk_prob True"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 8}, "num_key_value_heads 8"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"model_type": "deepseek_v32", "q_lora_rank": None}, "q_lora_rank must be set: the indexer"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["full"]}, "'shared' for each of 78 layers"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["shared"] * 78}, "must begin with 'full'"),
        ({"model_type": "glm_moe_dsa", "index_topk_pattern": "X" * 78}, "'shared' for each of 78 layers"),
        ({"model_type": "deepseek_v3", "n_group": 7}, r"n_group must divide n_routed_experts \(256\), got 7"),
        ({"model_type": "deepseek_v3", "n_group": 256}, "n_group must leave at least two experts a group, got 256"),
        ({"model_type": "deepseek_v3", "topk_group": 9}, r"topk_group must be at most n_group \(8\), got 9"),
        ({"model_type": "deepseek_v3", "num_experts_per_tok": 129}, "num_experts_per_tok is 129, and only 128"),
        ({"model_type": "deepseek_v3", "qk_rope_head_dim": 7}, "even rotary size, got 7"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention True"),
        ({"model_type": "gpt2", "n_head": 7}, "n_embd must be a multiple of the 7"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "must be at most num_experts \\(8\\), got 9"),
        ({"model_type": "qwen3_moe", "num_local_experts": 0}, "num_local_experts must be at least 1"),
        ({"model_type": "qwen2_moe", "mlp_only_layers": "1"}, "mlp_only_layers must be a list of layer numbers"),
        ({"model_type": "qwen2_moe", "mlp_only_layers": 1}, "mlp_only_layers must be a list of layer numbers"),
        ({"model_type": None}, "has no model_type"),
    ],
)
def test_mistakes_name_the_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder_spec({"model_type": "llama", **config})


@pytest.mark.parametrize("name", ["lama", "spec", "sizes", "", "llama.x", "no_such"])
def test_unknown_model_types_name_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="is not supported") as caught:
        family(name)
    assert (
        "gemma2, gemma3_text, gemma4_text, glm4, glm4_moe, glm_moe_dsa, gpt2, gpt_oss, granite, kimi_k2, llama, "
        in str(caught.value)
    )
    assert ("did you mean llama" in str(caught.value)) == (name in ("lama", "llama.x"))


@pytest.mark.parametrize("name", known_families())
def test_names_that_a_family_has_not(name: str) -> None:
    spec = decoder_spec({"model_type": name, "num_experts_per_tok": 1, "head_dim": 128})
    for wrong in ("layers.0.attention.r.weight", "middle.weight", "layers.0", "layers.x.attention.q.weight", "embed"):
        with pytest.raises(ValueError, match="parameter"):
            family(name).tensor_source(wrong, spec)


_ODD_NUMBERS = (0, 0.0, -1, 0.5, 1, 1.0, 2, 3, 1e-300, 1e-45, 1e-20, 1e15, 1e30, 1e308, 2**31, 2**40, 2**63, 10**30)
_ODD_VALUES: tuple[Any, ...] = (*_ODD_NUMBERS, 10**400, math.inf, -math.inf, math.nan, "x", [], [math.nan], True, None)
_ROPE = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_FACTORS = {"short_factor": [1.0] * 64, "long_factor": [1.0] * 64}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", known_families())
def test_no_number_is_more_than_a_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[tuple[str, str]] = set()
    is_there = HFConfig.has

    def has(config: HFConfig, key: str) -> bool:
        read.add((config.section_name, key))
        return is_there(config, key)

    monkeypatch.setattr(HFConfig, "has", has)
    for kind in ("default", "linear", "dynamic", "llama3", "yarn", "longrope"):
        rope = {"rope_type": kind, **_ROPE, **_FACTORS}
        config = {"model_type": name, "num_experts_per_tok": 1, "head_dim": 128, "num_hidden_layers": 2}
        config["rope_parameters"] = rope
        read.clear()
        with contextlib.suppress(ValueError):
            decoder_spec(config)
        for section, key in sorted(read):
            if section not in ("", "rope_parameters.") or (kind != "default" and not section):
                continue
            for value in _ODD_VALUES:
                odd = {**config, "rope_parameters": {**rope, key: value}} if section else {**config, key: value}
                with contextlib.suppress(ValueError):
                    msgspec.msgpack.encode(decoder_spec(odd))  # engines and workers get it in this form


def test_null_and_missing_differ_where_it_matters() -> None:
    config = HFConfig({"there": 3, "null": None})
    assert config.optional_integer("there", 7) == 3
    assert config.optional_integer("null", 7) is None
    assert config.optional_integer("missing", 7) == 7
    assert config.integer("null", 7) == 7
    with pytest.raises(ValueError, match="missing is missing"):
        config.integer("missing")


@pytest.mark.parametrize("wrong", ["", None, 0, "other_attention"])
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5_text"])
def test_types_of_layers_that_a_family_has_not(name: str, wrong: object) -> None:
    values = {"model_type": name, "num_hidden_layers": 2, "layer_types": ["full_attention", wrong]}
    with pytest.raises(ValueError, match=r"layer_types has .*; supported: full_attention, "):
        decoder_spec(values)


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("nemotron_h", {"mamba_num_heads": 12}, "mamba_num_heads 12 is no multiple of n_groups, 8"),
        ("nemotron_h", {"time_step_limit": [0.001, math.inf]}, "time_step_limit bounds steps, which is not supported"),
        ("nemotron_h", {"time_step_limit": 0.5}, "time_step_limit must be a list of two numbers, got 0.5"),
        ("nemotron_h", {"use_bias": True}, "use_bias is not supported"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias is not supported with experts"),
        ("nemotron_h", {"hybrid_override_pattern": "-M"}, "block of kind mlp that follows no Mamba or attention block"),
        ("qwen3_5_text", {"linear_num_value_heads": 24}, "linear_num_value_heads 24 is no multiple of the key heads"),
    ],
    ids=str,
)
def test_mixers_that_no_kernel_has(name: str, values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decoder_spec({"model_type": name, **values})


@pytest.mark.parametrize(("name", "key"), [("qwen3_5_text", "linear_conv_kernel_dim"), ("nemotron_h", "conv_kernel")])
def test_convolutions_wider_than_those_of_kernels(name: str, key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} must be at most 16, got 17"):
        decoder_spec({"model_type": name, key: 17})
