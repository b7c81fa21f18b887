"""Claims about what parallel axes move, and what links make of it."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.claims.base import (
    DEEPSEEK,
    LLAMA_8B,
    LLAMA_70B,
    Claim,
    against,
    cluster,
    decided,
    model,
    short,
    speed,
)
from scripts.claims.memory import plain_bytes
from shardline.models.communication import (
    Traffic,
    expert_traffic,
    pipeline_traffic,
    tensor_traffic,
)
from shardline.models.partition import Span
from shardline.models.spec import DecoderSpec
from shardline.planner.hardware import known_gpus
from shardline.planner.layout import Demand, Layout
from shardline.planner.path import tensor_efficiency
from shardline.planner.search import Fixed, search
from shardline.planner.timing import shipped_timing

TITLE = "Communication"
_PREFILL = 4096 * 32
_GB = 1e9


def all_reduce_payload(spec: DecoderSpec, num_tokens: int, dtype_bytes: int = 2) -> Traffic:
    """What guides count for all-reduces: the bytes of the summed tensors, not those on the wire; two in each layer."""
    reduces = 2 * len(spec.layers)
    return Traffic(reduces * num_tokens * spec.hidden_size * dtype_bytes, reduces)


def claims() -> Iterator[Claim]:
    """All of them."""
    spec = model(LLAMA_70B).spec
    layers = Span(0, len(spec.layers))
    payload = all_reduce_payload(spec, 32)
    yield against(
        "All-reduces of 512 KB x 160 = 80 MB per token at batch 32 for a 70B",
        80,
        80,
        payload.num_bytes / 32e6,
        f"{{}} MB a token: {payload.num_bytes / 1e6:.0f} MB are those of a step, which makes 32 tokens",
    )
    prefill = all_reduce_payload(spec, _PREFILL).num_bytes / _GB
    yield against("All-reduces of 300 GB for a 4K x 32 prefill", 300, 300, prefill, "{} GB")
    hand_off = pipeline_traffic(spec, 2, _PREFILL).num_bytes / _GB
    yield against("PP hand-off: 1 GB per prefill (4K x 32)", 1, 1, hand_off, "{} GB a stage boundary")
    decode = pipeline_traffic(spec, 2, 32).num_bytes
    yield against("PP hand-off: 0.5 MB per decode step (batch 32)", 0.5, 0.5, decode / 1e6, "{} MB")
    yield from _ten_gigabit(decode)
    stages, batches = 16, 8
    bubble = (stages - 1) / (batches + stages - 1)
    yield against(
        "Bubble fraction is 1 / micro-batches: 12.5% at 8 and 16 stages",
        0.125,
        0.125,
        bubble,
        "{}: (stages - 1) / (micro-batches + stages - 1)",
    )
    yield from _efficiency()
    yield from _rates(tensor_traffic(spec, layers, 4, 32, "vllm").num_bytes)
    constants = shipped_timing()["vllm"].constants
    reduced = 2 * 32 * spec.hidden_size * 2 * 3 / 4
    one = 1e3 * (constants.message + reduced / constants.link / 450e9)
    chunk = 1e3 * (constants.message + reduced / 32 * 8192 / constants.link / 450e9)
    yield against(
        "0.5-2 ms per all-reduce on NVLink",
        0.5,
        2,
        one,
        f"{{}} ms at batch 32, {short(chunk)} ms for 8,192 tokens",
    )


def _ten_gigabit(decode: float) -> Iterator[Claim]:
    """Pipeline hand-offs over 10 GbE, against the steps that they follow."""
    step = speed(LLAMA_70B, "8xH100", Layout("vllm", 4, 2), 32, 1024, 512).tpot.p50
    share = decode / 1.25e9 / step
    yield decided(
        "PP over 10 GbE is fine",
        share < 0.1,
        f"in decode: {decode / 1.25e6:.1f} ms of a token's {1e3 * step:.0f} ms",
    )
    spec, tokens = model(LLAMA_70B).spec, 8192
    hand_off = pipeline_traffic(spec, 2, tokens).num_bytes / 1.25e9
    arithmetic = 2 * plain_bytes(LLAMA_70B) / 2 * tokens / 8 / (989e12 * shipped_timing()["vllm"].constants.compute)
    yield decided(
        "PP over 10 GbE is a bottleneck",
        hand_off > 0.5 * arithmetic,
        f"for prompts: {1e3 * hand_off:.0f} ms for 8,192 tokens, which 8 H100 compute in {1e3 * arithmetic:.0f} ms",
    )


def _efficiency() -> Iterator[Claim]:
    """Speed-up of a decode step divided by the tensor-parallel size; 70B in FP8, 32 requests."""
    fixed = Fixed(tensor=8, pipeline=1, data=1, weights="bf16", kv="auto")
    demand = Demand(2048, 1024, 128, running=32)
    found = search(model(LLAMA_70B), cluster("8xH100"), demand, "latency", "vllm", fixed)
    best = found.options[0]
    nvlink, pcie = (tensor_efficiency(found, best, rate) for rate in (450e9, 64e9))
    for size, low, high in ((2, 0.85, 0.95), (4, 0.70, 0.85), (8, 0.56, 0.75)):
        yield against(
            f"TP efficiency on NVLink: {low:.0%}-{high:.0%} at {size}", low, high, nvlink[size], "{} (70B, batch 32)"
        )
    yield against("0.92 a card on NVLink", 0.92, 0.92, nvlink[2], "{} at TP 2")
    yield against("0.70-0.78 a card on PCIe", 0.70, 0.78, pcie[2], f"{{}} at TP 2 on PCIe Gen5, {pcie[4]:.2f} at TP 4")
    gains = {size: pcie[size] * size for size in pcie}
    told = ", ".join(f"TP {size}: {gain:.2f}x" for size, gain in gains.items())
    yield decided(
        "TP = 4 on PCIe is the sweet spot", gains[4] > 1.2 * gains[2], f"steps on PCIe Gen5 (batch 32): {told}"
    )
    yield decided("TP = 2 at most on PCIe", gains[4] <= gains[2], f"more GPUs still shorten steps: {told}")
    small = search(model(LLAMA_8B), cluster("8xH100"), demand, "latency", "vllm", fixed)
    of_small = tensor_efficiency(small, small.options[0], 64e9)
    share = speed(LLAMA_70B, "4xH100", Layout("vllm", 4), 32, link="pcie").link_share
    yield against(
        "PCIe TP4: 40-50% of the time is communication",
        0.4,
        0.5,
        share,
        f"{{}} of a decode step (70B, batch 32, Gen5); an 8B keeps {of_small[4]:.0%} of its GPUs' speed",
    )


def _rates(reduced: float) -> Iterator[Claim]:
    """Needed GB/s: what a step moves, over the time of the step on such GPUs."""
    step = speed(LLAMA_70B, "4xH100", Layout("vllm", 4), 32).tpot.p50
    yield against(
        "TP4 needs 50-200 GB/s a pair",
        50,
        200,
        reduced / step / 3 / _GB,
        "{} GB/s a pair averaged over a decode step (batch 32); short exchanges wait for latency",
    )
    spec = model(LLAMA_70B).spec
    stage = speed(LLAMA_70B, "4xH100", Layout("vllm", 1, 4), 32)
    per_stage = stage.tpot.p50 / 4
    yield against(
        "PP at batch 32 needs 0.05-0.2 GB/s in decode",
        0.05,
        0.2,
        pipeline_traffic(spec, 2, 8).num_bytes / per_stage / _GB,
        "{} GB/s (PP 4)",
    )
    rate = 989e12 * shipped_timing()["vllm"].constants.compute
    seconds = 8192 * plain_bytes(LLAMA_70B) / 4 / rate
    yield against(
        "PP needs 1-4 GB/s in prefill",
        1,
        4,
        pipeline_traffic(spec, 2, 8192).num_bytes / seconds / _GB,
        "{} GB/s (PP 4, 8,192 tokens)",
    )
    deepseek = model(DEEPSEEK).spec
    layers = Span(0, len(deepseek.layers))
    for quote, low, high, gpus, ranks in (
        ("EP needs 20-80 GB/s in a box", 20, 80, "8xH200", 8),
        ("EP needs 10-40 GB/s across two boxes", 10, 40, "2x8xH100", 16),
    ):
        layout = Layout("vllm", 1, 1, ranks, True, weights="fp8")
        traffic = expert_traffic(deepseek, layers, ranks, 64 * ranks, "vllm").num_bytes
        found = speed(DEEPSEEK, gpus, layout, 64 * ranks, 1024, 512)
        yield against(
            quote,
            low,
            high,
            traffic / found.tpot.p50 / _GB,
            f"{{}} GB/s a GPU (DeepSeek-V3, EP {ranks}, 64 requests a GPU, decode)",
        )
    gpus = known_gpus()
    ratios = [
        gpus[name].link.gbs / gpus[name].pcie_gbs for name in ("A100-80GB-SXM4", "H100-80GB-SXM5", "B200-180GB-SXM")
    ]
    told = ", ".join(f"{ratio:.1f}x" for ratio in ratios)
    yield decided(
        "NVLink is 14-28x PCIe",
        min(ratios) >= 14,
        f"A100, H100, B200 against their own PCIe: {told}, one direction each",
    )
