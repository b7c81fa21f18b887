"""Claims about weights, KV cache and what fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scripts.claims.base import (
    DEEPSEEK,
    LLAMA_70B,
    LLAMA_405B,
    MIXTRAL,
    QWEN_32B,
    Claim,
    against,
    cluster,
    decided,
    model,
    option,
    short,
)
from shardline.models.attention import cached_token_bytes
from shardline.models.sizes import checkpoint_bytes, flops
from shardline.models.stored_weights import StoredRules
from shardline.planner.hardware import GIB
from shardline.planner.layout import Demand, Layout
from shardline.planner.memory import fit, stored_weights

TITLE = "Weights, KV cache, and what fits"


def plain_bytes(name: str) -> int:
    """Bytes of a model's weights in 16 bits."""
    found = model(name)
    return checkpoint_bytes(found.spec, found.stored(StoredRules()))


def token_bytes(name: str, tensor: int = 1, kv: str = "bfloat16") -> int:
    """Bytes of keys and values of one token on a GPU."""
    return sum(cached_token_bytes(layer.attention, tensor, kv) for layer in model(name).spec.layers)  # type: ignore[arg-type]


def claims() -> Iterator[Claim]:
    """All of them."""
    weights, token = plain_bytes(LLAMA_70B), token_bytes(LLAMA_70B)
    yield against("70B: 140 GB in FP16", 140, 140, weights / 1e9, "{} GB")
    yield against(
        "70B, FP16: 23 passes a second on 3.35 TB/s", 23, 23, 3.35e12 / weights, "{}, if all bandwidth is used"
    )
    yield against("KV of a 70B: 30-40 GB at 4K x 32", 30, 40, 4096 * 32 * token / 1e9, "{} GB: 328 kB a token")
    long_ = 32768 * token / 1e9
    yield against(
        "42 GB of KV at 32K x 8 in FP16", 42, 42, 8 * long_, f"{{}} GB; {short(4 * long_)} GB with an FP8 cache"
    )
    yield against("5 GB of KV for a 32K request", 5, 5, long_, f"{{}} GB; {short(long_ / 2)} GB with an FP8 cache")
    yield against("2.5 GB of KV for an 8K request", 2.5, 2.5, 8192 * token / 1e9, "{} GB")
    int4 = checkpoint_bytes(model(LLAMA_70B).spec, stored_weights(model(LLAMA_70B), "int4")) / 1e9
    yield against("INT4 70B is 35 GB", 35, 35, int4, "{} GB with scales, and embeddings in 16 bits")
    yield against(
        "INT4 halves the memory", 0.5, 0.5, 1e9 * int4 / weights, "{} of the weights' 16 bits; the KV cache stays"
    )
    for quote, name, gpus, layout in (
        ("405B FP8 fits 4 x 80 GB", LLAMA_405B, "4xH100", Layout("vllm", 4, weights="fp8")),
        ("405B BF16 fits 8 x 80 GB", LLAMA_405B, "8xH100", Layout("vllm", 8)),
        ("DeepSeek-V3 FP8 fits 8 x 80 GB", DEEPSEEK, "8xH100", Layout("vllm", 8, weights="fp8")),
        ("DeepSeek-V3 BF16 fits 8 x 141 GB", DEEPSEEK, "8xH200", Layout("vllm", 8)),
    ):
        found = fit(model(name), layout, cluster(gpus), Demand(1024))
        yield decided(quote, found.verdict != "no", found.why_not or found.verdict)
    yield from _single_gpu()
    yield from _blocks()
    yield from _folklore()


def _single_gpu() -> Iterator[Claim]:
    one = option(LLAMA_70B, "1xH100", Layout("vllm", weights="int4"), Demand(32768)).fit
    big = option(LLAMA_70B, "1xMI300X", Layout("vllm"), Demand(8192)).fit
    yield decided(
        "70B fits no single GPU at any useful quantization",
        one.verdict == big.verdict == "no",
        f"int4 on one H100: {one.max_context:,} tokens; bf16 on one MI300X: {big.concurrency:.0f} requests of 8,192",
    )
    node = option(LLAMA_405B, "8xH200", Layout("vllm", 8), Demand(8192)).fit
    yield decided(
        "405B fits no node", node.verdict == "no", f"bf16 on 8xH200: {node.concurrency:.0f} requests of 8,192 tokens"
    )
    small = option(QWEN_32B, "1xRTX-4090", Layout("vllm"), Demand(4096)).fit
    mixtral = option(MIXTRAL, "2xA100-40GB", Layout("vllm", 2), Demand(4096)).fit
    yield decided(
        "Under 35B never needs several GPUs",
        small.verdict != "no",
        f"32B in bf16 on an RTX 4090: {small.why_not}; and speed may need them where memory does not",
    )
    yield decided("Mixtral (47B) fits 2 x 40 GB in BF16", mixtral.verdict != "no", mixtral.why_not or mixtral.verdict)
    yield decided(
        "DeepSeek-V3 is 671B-active",
        False,
        f"671B in all; a token uses 8 of 256 routed experts and the shared one: {_active_billions():.0f}B parameters",
    )
    copies = token_bytes(DEEPSEEK, 8) / token_bytes(DEEPSEEK, 1)
    yield decided(
        "TP = 8 on DeepSeek keeps 8 copies of the KV cache",
        copies == 1,
        "each GPU has the whole latent of a token: "
        f"{token_bytes(DEEPSEEK, 8) / 1e3:.0f} kB with 1 and with 8; this engine's CPU ranks share one copy",
    )


def _active_billions() -> float:
    """Billions of parameters of DeepSeek-V3 that one token uses."""
    spec = model(DEEPSEEK).spec
    return (flops(spec, 1) / 2 + spec.vocab_size * spec.hidden_size) / 1e9


def _blocks() -> Iterator[Claim]:
    name = "neuralmagic/Meta-Llama-3.1-70B-Instruct-FP8"
    demand = Demand(8192)
    one, two = (option(name, f"{size}xH100", Layout("vllm", size, weights="fp8"), demand).fit for size in (1, 2))
    yield against(
        "70B FP8 on 2 H100, utilization 0.9, 8,192 tokens: 12,830 KV blocks",
        12830,
        12830,
        two.kv_tokens / 16,
        "{} blocks",
    )
    free = (one.weight_bytes + one.other_bytes + 923 * 16 * token_bytes(name)) / cluster("1xH100").smallest.usable_bytes
    yield decided(
        "70B FP8 on one H100, utilization 0.9, 8,192 tokens: 923 KV blocks (so 13.9x from one to two)",
        one.kv_tokens >= 0.9 * 923 * 16,
        f"{one.why_not}; 923 blocks need a utilization of {free:.2f}",
    )


def _folklore() -> Iterator[Claim]:
    layout = Layout("vllm", 4)
    base = option(LLAMA_70B, "4xH100", layout, Demand(32768)).fit
    half = option(LLAMA_70B, "4xH100", layout, Demand(16384)).fit
    yield decided(
        "Halving max-model-len halves KV memory",
        half.kv_bytes < 0.6 * base.kv_bytes,
        f"the cache takes what is left: {base.kv_bytes / GIB:.1f} and {half.kv_bytes / GIB:.1f} GiB; only the requests "
        f"that fit double, from {base.concurrency:.0f} to {half.concurrency:.0f}",
    )
    low = option(LLAMA_70B, "4xH100", layout, Demand(32768, utilization=0.8)).fit
    yield decided(
        "Lowering gpu_memory_utilization gives more KV cache",
        low.kv_bytes > base.kv_bytes,
        f"0.8 instead of 0.9: {low.kv_bytes / GIB:.1f} instead of {base.kv_bytes / GIB:.1f} GiB",
    )
    tight = Demand(8192, utilization=0.9)
    refused = option(LLAMA_70B, "2xA100-80GB", Layout("vllm", 2), replace(tight, max_model_len=32768)).fit
    lower = option(LLAMA_70B, "2xA100-80GB", Layout("vllm", 2), replace(tight, utilization=0.8)).fit
    yield decided(
        "Lower utilization cures OOM",
        False,
        f"not at the start: 70B on 2xA100 holds {refused.max_context:,} tokens at 0.9, {lower.max_context:,} at 0.8. "
        "It helps only if something outside of the engine's count needs memory",
    )
    yield decided(
        "OOM is fragmentation",
        False,
        f"blocks of 16 tokens waste at most 15 tokens a request, {15 / 1152:.1%} at 1,152 tokens: memory is missing, "
        "not scattered",
    )
    share = base.kv_bytes / (0.9 * cluster("4xH100").smallest.usable_bytes)
    small = option(LLAMA_70B, "8xH100", Layout("vllm", 8), Demand(32768)).fit
    yield decided(
        "Reserve 40-50% of VRAM for the KV cache",
        False,
        f"what is needed is requests x tokens x bytes a token; 70B on 4xH100 leaves {share:.0%}, on 8xH100 "
        f"{small.kv_bytes / (0.9 * cluster('8xH100').smallest.usable_bytes):.0%}",
    )
