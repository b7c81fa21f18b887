"""Published verdicts, start-up logs and sizes: what fits, and how much is left."""

from __future__ import annotations

import pytest

from shardline.models.sizes import checkpoint_bytes, stage_spans
from shardline.planner import vllm
from shardline.planner.catalog import find_model, shipped_facts
from shardline.planner.cluster import parse_cluster
from shardline.planner.hardware import GIB, known_gpus
from shardline.planner.layout import Demand, Layout
from shardline.planner.memory import Fit, bits_label, fit, stored_weights

LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"
LLAMA_405B, DEEPSEEK = "meta-llama/Llama-3.1-405B-Instruct", "deepseek-ai/DeepSeek-V3"
MIXTRAL, QWEN_32B = "mistralai/Mixtral-8x7B-Instruct-v0.1", "Qwen/Qwen2.5-32B-Instruct"


def fits(model: str, gpus: str, layout: Layout, length: int = 8192, utilization: float = 0.9) -> Fit:
    cluster = parse_cluster(gpus, known_gpus())
    return fit(find_model(model), layout, cluster, Demand(length, utilization=utilization))


# (verdict, model, GPUs, weights, tp, pp, tokens of a request) at utilization 0.9
_VERDICTS = [
    ("no", LLAMA_405B, "4xA100-80GB", "fp8", 4, 1, 1024),
    ("no", LLAMA_405B, "4xRTX-PRO-6000", "fp8", 4, 1, 1024),
    ("no", LLAMA_405B, "8xH100", "bf16", 8, 1, 1024),
    ("no", DEEPSEEK, "8xH100", "fp8", 8, 1, 1024),
    ("no", DEEPSEEK, "8xH200", "bf16", 8, 1, 1024),
    ("no", "meta-llama/Llama-2-13b-hf", "L4", "bf16", 1, 1, 1024),
    ("no", MIXTRAL, "2xA100-40GB", "bf16", 2, 1, 1024),
    ("no", LLAMA_70B, "1xH100", "fp8", 1, 1, 16_000),
    ("short", LLAMA_70B, "2xA100-80GB", "bf16", 2, 1, 32_768),
    ("short", QWEN_32B, "1xRTX-4090", "int4", 1, 1, 32_768),
    ("yes", LLAMA_70B, "1xH100", "int4", 1, 1, 32_768),
    ("yes", LLAMA_70B, "8xL40S", "bf16", 8, 1, 8192),
    ("yes", LLAMA_70B, "MI300X", "bf16", 1, 1, 8192),
    ("yes", LLAMA_70B, "4xRTX-5090", "fp8", 4, 1, 8192),
    ("yes", LLAMA_405B, "8xH100", "fp8", 8, 1, 8192),
    ("yes", LLAMA_405B, "8xRTX-PRO-6000", "fp8", 8, 1, 8192),
    ("yes", LLAMA_405B, "8xH200", "bf16", 8, 1, 8192),
    ("yes", LLAMA_405B, "2x8xA100-80GB", "bf16", 8, 2, 8192),
    ("yes", MIXTRAL, "2xA100-80GB", "bf16", 2, 1, 8192),
]
_VLLM_ONLY = {"MI300X": "no back end for GPUs of AMD"}


@pytest.mark.parametrize(("verdict", "model", "gpus", "weights", "tp", "pp", "length"), _VERDICTS)
def test_verdicts(verdict: str, model: str, gpus: str, weights: str, tp: int, pp: int, length: int) -> None:
    for engine in ("shardline", "vllm"):
        result = fits(model, gpus, Layout(engine, tp, pp, weights=weights), length)
        if engine == "shardline" and gpus in _VLLM_ONLY:
            assert _VLLM_ONLY[gpus] in result.why_not
        elif verdict == "yes":
            assert result.verdict != "no", (engine, result)
            assert result.concurrency >= 1
            assert result.max_context >= length
        else:
            assert result.verdict == "no", (engine, result)
            assert result.why_not
            assert verdict == "no" or 4000 < result.max_context < length


def test_models_that_only_vllm_holds_packed() -> None:
    assert fits("openai/gpt-oss-120b", "1xH100", Layout("vllm", weights="mxfp4")).verdict != "no"
    refusal = fits("openai/gpt-oss-120b", "1xH100", Layout("shardline", weights="mxfp4")).why_not
    assert "217.61 GiB of weights" in refusal


@pytest.mark.parametrize(
    ("model", "gigabytes"),
    [
        (LLAMA_8B, 16),
        (LLAMA_70B, 140),
        (LLAMA_405B, 810),
        ("Qwen/Qwen2.5-72B-Instruct", 144),
        (MIXTRAL, 94),
        (DEEPSEEK, 1342),
    ],
)
def test_sizes_in_bf16(model: str, gigabytes: float) -> None:
    found = find_model(model)
    plain = found.stored(type(found.rules)())
    assert checkpoint_bytes(found.spec, plain) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_int4_of_70b_counts_scales_and_embeddings() -> None:
    model = find_model(LLAMA_70B)
    assert checkpoint_bytes(model.spec, stored_weights(model, "int4")) / 1e9 == pytest.approx(39.6, rel=0.005)


# (model, weights, tp, utilization, GiB of weights a GPU, GiB of KV a GPU): start-up logs of vLLM 0.11 on H100,
# llm-d-planner docs/empirical-vllm-memory-results.md
_LOGS = [
    ("openai/gpt-oss-20b", 1, 0.9, 13.47, 50.28),
    ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", 2, 0.9, 33.88, 32.0),
    ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", 1, 0.9, 67.72, -1.44),
    (LLAMA_8B, 1, 0.9, 14.99, 51.38),
    ("Qwen/Qwen3-0.6B", 1, 0.9, 1.12, 64.45),
    ("Qwen/Qwen3-32B", 1, 0.9, 61.03, 4.45),
    ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", 1, 0.95, 44.76, 28.2),
]


@pytest.mark.parametrize(("model", "tp", "utilization", "weights", "cache"), _LOGS)
def test_start_up_logs_of_vllm(model: str, tp: int, utilization: float, weights: float, cache: float) -> None:
    label = bits_label(find_model(model))
    result = fits(model, f"{tp}xH100", Layout("vllm", tp, weights=label), 16_000, utilization)
    assert result.weight_bytes / GIB == pytest.approx(weights, abs=0.02 * 79.18)
    assert result.kv_bytes / GIB == pytest.approx(cache, abs=0.02 * 79.18), "2% of the card's memory"


def test_windowed_layers_count_as_vllm_counts_them() -> None:
    """626,949 tokens in 64.68 GiB, by a start-up log: concurrency times max_model_len."""
    result = fits("google/gemma-4-31b-it", "H200", Layout("vllm"), 262_144)
    assert result.kv_tokens / result.kv_bytes == pytest.approx(626_949 / (64.68 * GIB), rel=0.002)


def test_the_start_up_of_a_model_with_an_image_encoder() -> None:
    """64.68 GiB of KV memory, by a start-up log that states no utilization."""
    result = fits("google/gemma-4-31b-it", "H200", Layout("vllm"), 262_144)
    assert result.kv_bytes / GIB == pytest.approx(64.68, abs=0.02 * 139.8)


@pytest.mark.parametrize(("length", "concurrency"), [(912_128, 1_009_661 / 912_128)])
def test_requests_of_deepseek_v4_take_what_vllm_logs(length: int, concurrency: float) -> None:
    """7.01 GiB hold 1,009,661 tokens at this length (vLLM issue 51041, which states no other numbers)."""
    model = find_model("deepseek-ai/DeepSeek-V4-Flash")
    stages = stage_spans(model.spec, 1)
    place = vllm.grid_of(Layout("vllm", 2)).place(0)
    size = vllm.request_size(model.spec, place, stages, "float8_e4m3fn", 8192)
    assert 7.01 * GIB / size(length) == pytest.approx(concurrency, rel=0.01)
    assert size(2 * length) < 1.6 * size(length), "states and windows do not grow"


def test_every_shipped_model_has_a_spec() -> None:
    facts = shipped_facts()
    for name in [*facts["models"], *facts["aliases"]]:
        model = find_model(name)
        assert checkpoint_bytes(model.spec, model.stored()) > 1e8, name
    assert all(entry["source"] for entry in facts["models"].values())


def test_a_refusal_of_the_shape_is_that_of_resolve() -> None:
    result = fits(LLAMA_8B, "8xH100", Layout("shardline", 7, 1))
    assert result.verdict != "no", "seven ranks share eight KV heads unevenly"
    assert fits(LLAMA_8B, "8xH100", Layout("vllm", 7)).why_not.startswith("vLLM needs a tensor-parallel size")
    refused = fits(LLAMA_8B, "64xH100", Layout("shardline", 48))
    assert "tensor_parallel_size 48 does not work" in refused.why_not
    assert "expert parallelism" in fits("Qwen/Qwen3-235B-A22B-FP8", "8xH100", Layout("vllm", 8, weights="fp8")).why_not
