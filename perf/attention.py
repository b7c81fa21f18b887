"""Decode attention against the memory: `python perf/attention.py`.

Attention in decode reads every key and value once, so the machine's read rate bounds it. For each shape, number of
sequences and context length, this prints the rate at which one layer's attention reads its pages, as a share of the
rate of `torch.sum` over memory of the same size. Calls alternate in one run, and figures are medians. A call uses the
next of several caches, so pages come from memory, as in a model; its blocks lie in random order. Blocks have the size
that an engine chooses, and pages lie on huge pages, as in an engine.

`--prefill` measures prompts of 2,048 tokens instead, on pages in cache: causal attention counts two multiply-adds for
each visible key and element, and its rate is compared with that of a large bf16 product of ours.

`--steps` measures whole steps instead, of models with random weights: how much longer a decode step of 16 sequences
takes with 1,024 tokens of context than with 16, against the time that `torch.sum` needs for the bytes of those keys and
values; and a step of the demo model with 64 sequences of 130 to 250 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from shardline import LLM, SamplingParams, _cpu
from shardline.deployment.cache import streamed_block_size
from shardline.runtime.machines.host.machine import HostBackend
from shardline.runtime.ops.attention.latent import mla_attention
from shardline.runtime.ops.attention.paged import paged_attention
from shardline.weights.formats import plain

BACKEND = HostBackend()
COLD_BYTES = 192 << 20  # of all caches of a case: more than the processor's caches hold
MOST_BYTES = 3 << 30
MIN_SECONDS = 0.1  # of calls per measurement
SETTLE_SECONDS = 0.1  # of calls before a measurement: the other library's idle threads spin on our cores for a while

Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """The heads of one layer."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    stored: torch.dtype | None = None
    """The type of keys and values in a quantized cache."""


SHAPES = (
    Shape("GQA 14/2 x 64", 14, 2, 64),
    Shape("GQA 32/8 x 128", 32, 8, 128),
    Shape("MHA 16 x 64", 16, 16, 64),
    Shape("MHA 32 x 96", 32, 32, 96),
    Shape("GQA 32/8 x 128, window 1,024", 32, 8, 128, window=1024),
    Shape("GQA 14/2 x 64, int8", 14, 2, 64, stored=torch.int8),
    Shape("GQA 32/8 x 128, int8", 32, 8, 128, stored=torch.int8),
    Shape("MHA 16 x 64, int8", 16, 16, 64, stored=torch.int8),
    Shape("GQA 32/8 x 128, fp8", 32, 8, 128, stored=torch.float8_e4m3fn),
)
LATENTS = "MLA 16 x (512 + 64)"  # DeepSeek-V2-Lite's
SEQUENCES = (1, 8, 32)
CONTEXTS = (1024, 8192, 32768)


@dataclass(frozen=True)
class Case:
    """Calls of one kernel, and the bytes of keys and values that a call reads."""

    call: Call
    num_bytes: int


def seconds_per_call(call: Call) -> float:
    settled = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < settled:
        call()
    count, started = 0, time.perf_counter()
    while True:
        call()
        count += 1
        elapsed = time.perf_counter() - started
        if elapsed > MIN_SECONDS:
            return elapsed / count


def num_copies(num_bytes: int) -> int:
    return max(1, math.ceil(COLD_BYTES / num_bytes))


def block_tables(num_seqs: int, num_blocks: int, rng: torch.Generator) -> Tensor:
    return torch.randperm(num_seqs * num_blocks, generator=rng).to(torch.int32).view(num_seqs, num_blocks)


def random_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    pages = BACKEND.pages_empty(shape, dtype)
    if dtype.itemsize == 1:
        pages.view(torch.int8).random_(-126, 127)  # no NaN of fp8
        return pages
    return pages.normal_()


def paged_case(shape: Shape, num_seqs: int, context: int, block_size: int | None) -> Case | None:
    """A decode step's attention in one layer, or None if its keys and values are too many to measure."""
    rng = torch.Generator().manual_seed(0)
    element = torch.bfloat16 if shape.stored is None else shape.stored
    block_size = block_size or streamed_block_size(shape.dim, element.itemsize)
    blocks_each = context // block_size
    cache_shape = (num_seqs * blocks_each, shape.kv_heads, block_size, shape.dim)
    pool_bytes = 2 * math.prod(cache_shape) * element.itemsize
    if pool_bytes > MOST_BYTES:
        return None
    seen = min(context, shape.window or context)
    scale_bytes = 0 if shape.stored is None else 4
    num_bytes = 2 * num_seqs * shape.kv_heads * seen * (shape.dim * element.itemsize + scale_bytes)

    def cache() -> dict[str, Tensor]:
        made = {name: random_pages(cache_shape, element) for name in ("key_cache", "value_cache")}
        if shape.stored is None:
            return made
        scales = (random_pages(cache_shape[:3], torch.float32).abs_() for _ in range(2))
        return made | dict(zip(("key_scales", "value_scales"), scales, strict=True))

    query = torch.randn(num_seqs, shape.heads, shape.dim, dtype=torch.bfloat16)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    lengths = torch.full((num_seqs,), context, dtype=torch.int32)
    turns = cycle([(cache(), block_tables(num_seqs, blocks_each, rng)) for _ in range(num_copies(num_bytes))])

    def call() -> object:
        pages, tables = next(turns)
        scale = shape.dim**-0.5
        return paged_attention(
            BACKEND.kernels,
            query,
            block_tables=tables,
            query_starts=starts,
            context_lens=lengths,
            scale=scale,
            window=shape.window,
            **pages,
        )

    return Case(call, num_bytes)


def latent_case(num_seqs: int, context: int, block_size: int | None) -> Case | None:
    """The same for latents."""
    rng = torch.Generator().manual_seed(0)
    heads, latent_dim, rope_dim = 16, 512, 64
    block_size = block_size or streamed_block_size(latent_dim, 2)
    blocks_each = context // block_size
    num_bytes = num_seqs * context * (latent_dim + rope_dim) * 2
    if num_bytes > MOST_BYTES:
        return None
    query = torch.randn(num_seqs, heads, latent_dim + rope_dim, dtype=torch.bfloat16)
    latent, rope = query[..., :latent_dim].contiguous(), query[..., latent_dim:]
    starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    lengths = torch.full((num_seqs,), context, dtype=torch.int32)
    cache_shape = (num_seqs * blocks_each, block_size, latent_dim + rope_dim)
    turns = cycle(
        [
            (random_pages(cache_shape, torch.bfloat16), block_tables(num_seqs, blocks_each, rng))
            for _ in range(num_copies(num_bytes))
        ]
    )

    def call() -> object:
        cache, tables = next(turns)
        return mla_attention(BACKEND.kernels, latent, rope, cache, tables, starts, lengths, 0.05)

    return Case(call, num_bytes)


def read_call(num_bytes: int) -> Call:
    """`torch.sum` over as many bytes, in turns over as many copies."""
    turns = cycle([torch.ones(num_bytes // 4) for _ in range(num_copies(num_bytes))])
    return lambda: next(turns).sum()


@dataclass(frozen=True)
class PromptCase:
    """Calls of one kernel on a whole prompt, and the FLOPs of a call."""

    call: Call
    flops: float


def prompt_cases(num_tokens: int) -> Iterator[tuple[str, PromptCase]]:
    """One layer's attention of a whole prompt, for each shape that has one chunk of keys per token."""
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    lengths = torch.tensor([num_tokens], dtype=torch.int32)
    pairs = num_tokens * (num_tokens + 1) / 2
    rng = torch.Generator().manual_seed(0)

    def pages(heads: tuple[int, ...], dim: int) -> tuple[Tensor, Tensor]:
        block_size = streamed_block_size(dim, 2)
        num_blocks = -(-num_tokens // block_size)
        return random_pages((num_blocks, *heads, block_size, dim), torch.bfloat16), block_tables(1, num_blocks, rng)

    def paged_call(shape: Shape) -> Call:
        query = torch.randn(num_tokens, shape.heads, shape.dim, dtype=torch.bfloat16)
        (keys, tables), values = pages((shape.kv_heads,), shape.dim), pages((shape.kv_heads,), shape.dim)[0]
        scale = shape.dim**-0.5
        return lambda: paged_attention(BACKEND.kernels, query, keys, values, tables, starts, lengths, scale)

    def latent_call() -> Call:
        latent, rope = (torch.randn(num_tokens, 16, dim, dtype=torch.bfloat16) for dim in (512, 64))
        cache, tables = pages((), 512 + 64)
        return lambda: mla_attention(BACKEND.kernels, latent, rope, cache, tables, starts, lengths, 0.05)

    for shape in SHAPES:
        if shape.window is None and shape.stored is None:
            yield shape.name, PromptCase(paged_call(shape), 4 * pairs * shape.heads * shape.dim)
    yield LATENTS, PromptCase(latent_call(), 2 * pairs * 16 * (512 + 64 + 512))


def large_product() -> tuple[Call, float]:
    """A bf16 product whose rate is the most that ours reach, and its FLOPs."""
    rows, weight = torch.randn(2048, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    linear = plain.Format().pack_linear(BACKEND.kernels, weight)
    return lambda: linear(rows), 2.0 * len(rows) * weight.numel()


def report_prompt(name: str, case: PromptCase, rounds: int) -> str:
    product, flops = large_product()
    times, shares = [], []
    for _ in range(rounds):
        own, other = seconds_per_call(case.call), seconds_per_call(product)
        times.append(own * 1e3)
        shares.append(case.flops / own / (flops / other))
    rate = case.flops / statistics.median(times) / 1e6
    return (
        f"{name:30} {statistics.median(times):6.1f} ms [{min(times):.1f}-{max(times):.1f}], {rate:.0f} GFLOP/s, "
        f"{statistics.median(shares):.2f} x a large product [{min(shares):.2f}-{max(shares):.2f}]"
    )


def report(name: str, case: Case, rounds: int) -> str:
    read = read_call(case.num_bytes)
    shares, rates = [], []
    for _ in range(rounds):
        own, theirs = seconds_per_call(case.call), seconds_per_call(read)
        shares.append(theirs / own)
        rates.append(case.num_bytes / own / 1e9)
    return (
        f"{name}: {statistics.median(rates):5.1f} GB/s, {statistics.median(shares):.2f} x torch.sum "
        f"[{min(shares):.2f}-{max(shares):.2f}]"
    )


STEP_MODELS = {
    "Llama, 12 layers, MHA 16 x 64": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 16,
    },
    "Qwen2.5-0.5B, 24 layers, GQA 14/2 x 64": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    },
}  # fmt: skip
COMMON_CONFIG = {
    "vocab_size": 151936, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_theta": 1e6, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
STEPS = 32


def step_seconds(llm: LLM, prompts: Sequence[Sequence[int]]) -> float:
    """Seconds of a decode step of all prompts together; the prefix cache has the prompts after the first call."""
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]

    def seconds(num_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        started = time.perf_counter()
        llm.generate(requests, params, use_tqdm=False)
        return time.perf_counter() - started

    return (seconds(1 + STEPS) - seconds(1)) / STEPS


def random_prompts(count: int, lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(10, vocab_size, (n,), generator=rng).tolist() for n, _ in zip(cycle(lengths), range(count))]


def report_steps(name: str, config: dict[str, object], threads: int, rounds: int) -> str:
    """What 1,024 tokens of context add to a step of 16 sequences."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config | COMMON_CONFIG))
        with LLM(folder, load_format="dummy", max_model_len=2048, cpu_threads=threads) as llm:
            short, long = (random_prompts(16, [length], 151936) for length in (16, 1024))
            heads, layers = int(str(config["num_key_value_heads"])), int(str(config["num_hidden_layers"]))
            num_bytes = 16 * (1024 - 16) * layers * heads * 64 * 2 * 2
            read = read_call(num_bytes)
            for prompts in (short, long):
                step_seconds(llm, prompts)
            times = [(step_seconds(llm, short), step_seconds(llm, long), seconds_per_call(read)) for _ in range(rounds)]
    shares = [least / (more - few) for few, more, least in times]
    few, more, least = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    return (
        f"{name}: {few:.1f} ms with 16 tokens, {more:.1f} with 1,024: {more - few:.1f} for {num_bytes / 1e9:.2f} GB; "
        f"torch.sum {least:.1f}, {statistics.median(shares):.2f} x [{min(shares):.2f}-{max(shares):.2f}]"
    )


def report_demo(threads: int, rounds: int) -> str:
    with LLM("demo", cpu_threads=threads, max_num_seqs=64) as llm:
        prompts = random_prompts(64, range(130, 250, 7), 2048)
        step_seconds(llm, prompts)
        times = [step_seconds(llm, prompts) * 1e3 for _ in range(rounds)]
    return f"demo, 64 sequences: {statistics.median(times):.2f} ms a step [{min(times):.2f}-{max(times):.2f}]"


def cases(
    only: str, sequences: Sequence[int], contexts: Sequence[int], block_size: int | None
) -> Iterator[tuple[str, Case]]:
    for num_seqs in sequences:
        for context in contexts:
            for shape in SHAPES:
                if only in shape.name and (case := paged_case(shape, num_seqs, context, block_size)):
                    yield f"{shape.name:30} {num_seqs:3} x {context:6}", case
            if only in LATENTS and (case := latent_case(num_seqs, context, block_size)):
                yield f"{LATENTS:30} {num_seqs:3} x {context:6}", case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="measure the shapes whose name contains this")
    parser.add_argument("--sequences", nargs="+", type=int, default=SEQUENCES)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--block-size", type=int, help="tokens of a block, instead of the size that an engine chooses")
    parser.add_argument("--prefill", nargs="?", type=int, const=2048, metavar="TOKENS", help="measure whole prompts")
    parser.add_argument("--steps", action="store_true", help="measure whole steps")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _cpu.set_num_threads(args.threads)
    print(f"{args.threads} threads, {_cpu.isa()}", flush=True)
    if args.steps:
        for name, config in STEP_MODELS.items():
            if args.only in name:
                print(report_steps(name, config, args.threads, args.rounds), flush=True)
        if args.only in "demo":
            print(report_demo(args.threads, args.rounds), flush=True)
        return
    if args.prefill:
        for name, prompt_case in prompt_cases(args.prefill):
            if args.only in name:
                print(report_prompt(name, prompt_case, args.rounds), flush=True)
        return
    for name, case in cases(args.only, args.sequences, args.contexts, args.block_size):
        print(report(name, case, args.rounds), flush=True)


if __name__ == "__main__":
    main()
