"""Claims about tokens per second, and about what raises them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace

from scripts.claims.base import (
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    Claim,
    against,
    cluster,
    decided,
    model,
    short,
    speed,
    unchecked,
)
from scripts.claims.memory import plain_bytes
from scripts.published.rows import ROWS, Works, read_rows
from shardline.planner.hardware import known_gpus
from shardline.planner.layout import Demand, Layout
from shardline.planner.search import Fixed, search
from shardline.planner.simulation.replica import ReplicaSetup
from shardline.planner.simulation.simulate import replica_setup, simulate
from shardline.planner.simulation.workload import Prefixes, poisson

TITLE = "Speed"


def ceiling(weights: float, gpus: str, count: int, running: int) -> float:
    """Tokens per second if a step only read the weights, at the full bandwidth."""
    return running * count * cluster(gpus).slowest.bandwidth_gbs * 1e9 / weights


def claims() -> Iterator[Claim]:
    """All of them."""
    yield from _seventy()
    yield from _recipes()
    yield from _techniques()
    yield from _from_rows()


def _seventy() -> Iterator[Claim]:
    weights = plain_bytes(LLAMA_70B)
    a100, h100 = ceiling(weights, "1xA100-80GB", 4, 32), ceiling(weights, "1xH100", 4, 32)
    ours = {
        name: speed(LLAMA_70B, gpus, Layout("vllm", 4, weights=label), 32, 128, 512, link).output_tok_s.p50
        for name, gpus, label, link in (
            ("nvlink", "4xA100-80GB", "bf16", None),
            ("pcie", "4xA100-80GB", "bf16", "pcie"),
            ("awq", "4xA100-80GB", "int4", None),
            ("h100", "4xH100", "bf16", None),
        )
    }
    yield against(
        "70B, 4 x A100 NVLink, batch 32: 1,800 tok/s",
        1800,
        1800,
        ours["nvlink"],
        f"{{}} tok/s (128 in, 512 out); {short(a100)} is the ceiling of reading 16-bit weights alone",
    )
    yield against("70B, 4 x A100 PCIe, batch 32: 900 tok/s", 900, 900, ours["pcie"], "{} tok/s")
    yield against("70B AWQ, 4 x A100, batch 32: 2,400 tok/s", 2400, 2400, ours["awq"], "{} tok/s")
    yield against(
        "70B, 4 x H100, batch 32: 4,200 tok/s",
        4200,
        4200,
        ours["h100"],
        f"{{}} tok/s; more than the ceiling of 16-bit weights, {short(h100)}",
    )
    one = speed(LLAMA_70B, "1xA100-80GB", Layout("vllm", weights="int4"), 32, 128, 512).output_tok_s.p50
    yield decided(
        "70B unquantized on one A100: 450 tok/s",
        False,
        f"{weights / 1e9:.0f} GB do not fit 80; in int4 {one:.0f} tok/s at batch 32",
    )
    gpt = 350e9
    yield decided(
        "175B, 128 A100s, PP 16 x TP 8, 64 sequences: 450 tok/s",
        False,
        f"one node of 8 reads 350 GB in {gpt / 8 / 2.039e12 * 1e3:.0f} ms: up to "
        f"{ceiling(gpt, '1xA100-80GB', 8, 64):,.0f} tok/s, so 128 GPUs at 450 are idle most of the time",
    )
    alone = 1 / speed(LLAMA_70B, "1xH100", Layout("vllm", weights="int4"), 1).tpot.p50
    yield against("70B INT4 on one H100: 40-60 tok/s a request", 40, 60, alone, "{} tok/s, alone")
    found = speed(LLAMA_70B, "1xA100-80GB", Layout("vllm", weights="int4"), None).output_tok_s.p50
    yield against(
        "70B on one A100: about 450 tok/s (in the table of costs)",
        450,
        450,
        found,
        "{} tok/s in int4 with as many requests as fit",
    )


def _recipes() -> Iterator[Claim]:
    four = Layout("vllm", 4, weights="fp8")
    alone = 1 / speed(LLAMA_70B, "4xRTX-5090", four, 1).tpot.p50
    yield against("70B FP8 on 4 x RTX 5090: 30-40 tok/s a request", 30, 40, alone, "{} tok/s, alone")
    many = speed(LLAMA_70B, "4xRTX-5090", four, 32).output_tok_s.p50
    yield against("70B FP8 on 4 x RTX 5090: 400-600 tok/s at 32", 400, 600, many, "{} tok/s")
    big = 1 / speed(LLAMA_405B, "2x4xRTX-PRO-6000", Layout("vllm", 4, 2, weights="fp8"), 1).tpot.p50
    yield against("405B FP8 on 2 x 4 PRO 6000: 6-12 tok/s a request", 6, 12, big, "{} tok/s, alone (TP 4 x PP 2)")
    base = speed(LLAMA_8B, "1xRTX-4090", Layout("vllm", weights="fp8"), 8).output_tok_s.p50
    four_cards = speed(LLAMA_8B, "4xRTX-4090", Layout("vllm", 4, weights="fp8"), 8).output_tok_s.p50
    yield against(
        "4 x 4090 are 1.5-2x as fast as one",
        1.5,
        2,
        four_cards / base,
        "{}x for a batch of 8 (8B FP8, TP 4); four replicas do 4x the requests",
    )


def _setup(name: str, gpus: str, demand: Demand, **changes: object) -> ReplicaSetup:
    fixed = Fixed(tensor=1, pipeline=1, data=1, weights="bf16", kv="auto")
    found = search(model(name), cluster(gpus), demand, "cost", "vllm", fixed)
    return replace(replica_setup(found, found.options[0]), **changes)  # type: ignore[arg-type]


def _techniques() -> Iterator[Claim]:
    yield from _batching()
    yield from _prefixes()
    ratios = [_speculation(share) for share in (0.6, 0.8)]
    yield against(
        "Speculation: 1.5-2.5x",
        1.5,
        2.5,
        sum(ratios) / 2,
        f"{{}}x: {ratios[0]:.1f}x at an acceptance of 0.6, {ratios[1]:.1f}x at 0.8 (4 drafts of an 8B for a "
        "70B, one request)",
    )
    yield unchecked(
        "INT4 loses 1-3% (or 0.5-1.5 points)", "answers of the models named to a benchmark, in 16 and in 4 bits"
    )
    yield decided(
        "Different tokens per TP size have no fix",
        False,
        "no floating-point sum crosses a rank here; tests/exactness compares logits bit for bit",
    )


def _batching() -> Iterator[Claim]:
    demand = Demand(4096, 512, 256)
    paged = _setup(LLAMA_8B, "1xL40S", demand)
    whole = paged.num_blocks * paged.cache.block_size // demand.max_model_len
    reserved = replace(paged, limits=type(paged.limits)(whole, paged.limits.max_num_batched_tokens))
    first, second = (
        simulate(one, poisson(float("inf"), 400, 512, 256), demand).output_tokens_per_second
        for one in (paged, reserved)
    )
    yield against(
        "PagedAttention: 2-4x the throughput",
        2,
        4,
        first / second,
        f"{{}}x, simulated: 8B on an L40S, 4,096 tokens reserved for each of {whole} requests, against "
        "blocks (768 tokens are used)",
    )
    turns = replace(paged, limits=type(paged.limits)(8, 8192))
    batch = simulate(turns, poisson(float("inf"), 64, 512, 256), demand).output_tokens_per_second
    longest = 256 / 176  # outputs drawn evenly from 96 to 256 tokens: a fixed batch waits for its longest
    yield against(
        "Continuous batching: +30-50%",
        1.3,
        1.5,
        longest,
        f"+{longest - 1:.0%} for outputs of 96 to 256 tokens, drawn evenly: the mean slot of a fixed batch "
        f"is idle for the rest (8 slots at {batch:.0f} tok/s)",
    )


def _prefixes() -> Iterator[Claim]:
    shared = Demand(8192, 4096, 64)
    four = _setup(LLAMA_8B, "1xL40S", shared, num_blocks=3000)
    routed = {
        policy: simulate(
            four, poisson(float("inf"), 240, 4096, 64, Prefixes(3840, 32)), shared, num_replicas=4, policy=policy
        )
        for policy in ("round_robin", "prefix_hash")
    }
    hits = [one.prefix_hit_rate for one in routed.values()]
    ratio = routed["prefix_hash"].output_tokens_per_second / routed["round_robin"].output_tokens_per_second
    yield against(
        "Prefix routing doubles the throughput",
        2,
        2,
        ratio,
        "{}x, simulated: 32 prefixes of 3,840 tokens, 4 replicas whose caches hold about 12 each; hits "
        f"{hits[0]:.0%} and {hits[1]:.0%}",
    )
    loads = [speed(LLAMA_8B, "1xL40S", Layout("vllm"), 8, tokens, 64).ttft.p50 for tokens in (4096, 4096 // 2)]
    yield against(
        "Prefix caching cuts first-token latency by 40-70%",
        0.4,
        0.7,
        1 - loads[1] / loads[0],
        "{} if half of a 4,096-token prompt is cached; what is cached is saved",
    )


def _speculation(accepted: float, drafts: int = 4) -> float:
    """Speed-up of one request if each draft token is accepted with this probability."""
    target, draft = (speed(name, "4xH100", Layout("vllm", 4), 1, 1024, 256).tpot.p50 for name in (LLAMA_70B, LLAMA_8B))
    tokens = sum(accepted**place for place in range(drafts + 1))
    return tokens * target / (target + drafts * draft)


def _from_rows() -> Iterator[Claim]:
    rows, _ = read_rows(ROWS)
    by_load: dict[object, dict[str, float]] = {}
    for row in rows:
        if row.tpot is not None and row.running is not None:
            layout = replace(row.layout, engine="")
            key = (row.model, row.gpu, layout, row.running, row.input_len, row.output_len)
            by_load.setdefault(key, {}).setdefault(row.engine, row.tpot)
    ratios = [one["vllm"] / one["trtllm"] for one in by_load.values() if {"vllm", "trtllm"} <= set(one)]
    if ratios:
        yield against(
            "TensorRT-LLM is 20-40% faster",
            0.2,
            0.4,
            statistics.median(ratios) - 1,
            f"+{{}} in the median of {len(ratios)} pairs with equal model, GPU, layout and load",
        )
    works = Works(known_gpus())
    shares = []
    for row in rows:
        if row.tpot is None or not row.running or row.layout.num_gpus > 1:
            continue
        try:
            steps = works.steps(row)
        except ValueError:
            continue
        shares.append((steps.decode.weights + steps.decode.cache) / row.tpot)
    if shares:
        yield against(
            "One GPU stays 60-70% below its ceiling",
            0.6,
            0.7,
            1 - statistics.median(shares),
            f"{{}} below the bandwidth in the median of {len(shares)} rows with one GPU",
        )
