"""The speed of each kernel, compared with the GPU's own ceilings.

Inputs rotate through more memory than the L2 holds. Many launches are captured in one CUDA graph, so a launch costs as
much as in a captured decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.triton.gemm import Tile
from shardline.kernels.cuda.triton.linear import launch_linear

from .inputs import attempt
from .tiles import FEW_ROWS, MANY_ROWS

kernels = CudaKernels(torch.device("cuda"))

_ROTATED_BYTES = 256 << 20
_LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def seconds(calls: list[Callable[[], Any]], repeats: int = 20) -> float:
    """Median seconds of one call. All calls are captured in a graph and replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times[2:])[repeats // 2]


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def time_linear(rows: int, columns: int, depth: int, tile: Tile | None) -> float:
    """Seconds of one product, with the tile that the kernel chooses or with another tile."""
    weight_bytes = 2 * columns * depth
    weights = [_randn(columns, depth) for _ in range(max(2, -(-_ROTATED_BYTES // weight_bytes)))]
    x, out = _randn(rows, depth), torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    return seconds([partial(launch_linear, x, weight, None, out, tile=tile) for weight in weights])


def time_gated(rows: int, width: int, depth: int) -> float:
    """Seconds of one kernel that computes gate, up and their activation."""
    weights = [_randn(2 * width, depth) for _ in range(max(2, -(-_ROTATED_BYTES // (4 * width * depth))))]
    x, out = _randn(rows, depth), torch.empty(rows, width, device="cuda", dtype=torch.bfloat16)
    return seconds([partial(launch_linear, x, weight, None, out, gate="silu") for weight in weights])


def time_library(rows: int, columns: int, depth: int) -> float:
    """Seconds of torch's product, which is not batch-invariant. The difference is the cost of exactness."""
    weights = [_randn(columns, depth) for _ in range(max(2, -(-_ROTATED_BYTES // (2 * columns * depth))))]
    x, out = _randn(rows, depth), torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    return seconds([partial(torch.mm, x, weight.T, out=out) for weight in weights])


def _entry(spent: Any, floor: float | None = None) -> Any:
    """Seconds as microseconds and as a share of the ceiling. A traceback from `attempt` is returned unchanged."""
    if isinstance(spent, str):
        return spent
    return {"us": spent * 1e6} if floor is None else {"us": spent * 1e6, "of_ceiling": floor / spent}


def linear_times(ceilings: dict[str, float]) -> dict[str, Any]:
    """By shape and rows: microseconds, and the share of the ceiling that binds."""
    result: dict[str, Any] = {}
    for name, (columns, depth) in _LLAMA_8B.items():
        for rows in (1, 64, 256, 2048, 8192):
            floor = max(
                2 * columns * depth / ceilings["copy_bytes_per_s"], 2 * rows * columns * depth / ceilings["flops"]
            )
            entry: dict[str, Any] = {"floor_us": floor * 1e6}
            for label, measured in (
                ("ours", attempt(time_linear, rows, columns, depth, None)),
                ("library", attempt(time_library, rows, columns, depth)),
            ):
                entry[label] = _entry(measured, floor)
            if name == "gate_up":
                entry["with silu_mul"] = _entry(attempt(time_gated, rows, columns // 2, depth), floor)
            result[f"{name} M={rows}"] = entry
    for rows, tiles in ((1, FEW_ROWS), (64, FEW_ROWS), (256, MANY_ROWS), (4096, MANY_ROWS)):
        for name in ("o", "gate_up"):
            columns, depth = _LLAMA_8B[name]
            for tile in tiles:
                spent = attempt(time_linear, rows, columns, depth, tile)
                result[f"tile {tile.name} {name} M={rows}"] = _entry(spent)
    return result


def time_quantized(rows: int, columns: int, depth: int, bits: int) -> float:
    """Seconds of one product of int8 rows with a weight of 8 or 4 bits."""
    shape = (columns, depth) if bits == 8 else (depth // 64, 34 * columns)
    dtype = torch.int8 if bits == 8 else torch.uint8
    weights = [
        torch.randint(0, 100, shape, device="cuda", dtype=dtype)
        for _ in range(max(2, -(-_ROTATED_BYTES // (columns * depth * bits // 8))))
    ]
    x, scales = torch.randint(-127, 127, (rows, depth), device="cuda", dtype=torch.int8), _randn(rows).float()
    out, column_scales = _randn(rows, columns), _randn(columns).float()
    return seconds([partial(launch_linear, x, weight, None, out, scales, column_scales) for weight in weights])


def time_w4a16(rows: int, columns: int, depth: int) -> float:
    """Seconds of one product with a weight in 4 bits, in groups of 128."""
    calls = []
    out, x = _randn(rows, columns), _randn(rows, depth)
    for _ in range(max(2, -(-_ROTATED_BYTES // (columns * depth // 2)))):
        values = torch.randint(0, 256, (depth // 64, columns, 32), device="cuda", dtype=torch.uint8)
        zeros = torch.randint(0, 16, (depth // 128, columns), device="cuda", dtype=torch.uint8)
        scales = torch.rand(depth // 128, columns, device="cuda").half()
        calls.append(partial(kernels.linear_w4a16, x, values, scales, zeros, 128, None, out))
    return seconds(calls)


def quantized_times(ceilings: dict[str, float]) -> dict[str, Any]:
    """Compare with the time for the weight's bytes, and with twice the arithmetic rate of bf16."""
    result: dict[str, Any] = {}
    for bits, stored in ((8, 8), (4, 4.5)):
        for rows in (1, 64, 2048):
            columns, depth = _LLAMA_8B["gate_up"]
            work = 2 * rows * columns * depth
            floor = max(columns * depth * stored / 8 / ceilings["copy_bytes_per_s"], work / 2 / ceilings["flops"])
            spent = attempt(time_quantized, rows, columns, depth, bits)
            result[f"int{bits} gate_up M={rows}"] = _entry(spent, floor)
    for rows in (1, 64, 2048):
        columns, depth = _LLAMA_8B["gate_up"]
        num_bytes, work = columns * depth * (4 + 24 / 128) / 8, 2 * rows * columns * depth
        floor = max(num_bytes / ceilings["copy_bytes_per_s"], work / ceilings["flops"])
        result[f"w4a16 gate_up M={rows}"] = _entry(attempt(time_w4a16, rows, columns, depth), floor)
    return result


_EXPERTS = {"Mixtral-8x7B": (8, 2, 14336, 4096), "Qwen3-30B-A3B": (128, 8, 768, 2048)}
"""Number of experts, experts per token, intermediate size and hidden size."""


def time_experts(num_tokens: int, num_experts: int, k: int, inner: int, hidden: int) -> float:
    """Seconds of both grouped products of a layer and the ops around them. Experts are chosen at random."""
    up, down = _randn(num_experts, 2 * inner, hidden), _randn(num_experts, hidden, inner)
    x, rows, out = _randn(num_tokens, hidden), _randn(num_tokens * k, inner), _randn(num_tokens, hidden)
    calls = []
    for _ in range(8):
        ids = torch.rand(num_tokens, num_experts, device="cuda").topk(k)[1].int()
        weights = torch.rand(num_tokens, k, device="cuda")
        calls.append(partial(kernels.expert_up, x, ids, 0, False, up, None, "silu", True, rows))
        calls.append(partial(kernels.expert_down, rows, ids, weights, 0, down, None, None, None, out))
    return 2 * seconds(calls)


def expert_times(ceilings: dict[str, float]) -> dict[str, Any]:
    """Compare with the time for the chosen experts' bytes (estimated), or for the products."""
    result: dict[str, Any] = {}
    for name, (num_experts, k, inner, hidden) in _EXPERTS.items():
        for num_tokens in (1, 16, 64, 256, 4096):
            met = num_experts * (1 - (1 - k / num_experts) ** num_tokens)
            floor = max(
                met * 6 * inner * hidden / ceilings["copy_bytes_per_s"],
                num_tokens * k * 6 * inner * hidden / ceilings["flops"],
            )
            spent = attempt(time_experts, num_tokens, num_experts, k, inner, hidden)
            result[f"{name} M={num_tokens}"] = _entry(spent, floor)
    return result


def time_attention(num_seqs: int, context: int, num_queries: int, stored: torch.dtype | None = None) -> float:
    """Seconds of one call with Llama-3.1-8B's heads. The queries are the last `num_queries` positions."""
    heads, kv_heads, dim, blocks = 32, 8, 128, -(-context // 16)
    sets = max(1, _ROTATED_BYTES // (num_seqs * context * kv_heads * dim * 4))
    calls: list[Callable[[], Any]] = []
    query = _randn(num_seqs * num_queries, heads, dim)
    out = torch.empty_like(query)
    starts = torch.arange(num_seqs + 1, device="cuda", dtype=torch.int32) * num_queries
    lens = torch.full((num_seqs,), context, device="cuda", dtype=torch.int32)
    for _ in range(min(sets, 16)):
        caches = [_randn(num_seqs * blocks + 1, kv_heads, 16, dim) for _ in range(2)]
        scales: list[Tensor] = []
        if stored is not None:
            caches = [(30 * cache).clamp(-127, 127).to(stored) for cache in caches]
            scales = [torch.rand(caches[0].shape[:3], device="cuda") for _ in range(2)]
        tables = (1 + torch.randperm(num_seqs * blocks, device="cuda")).int().view(num_seqs, blocks)
        arguments = (query, *caches, tables, starts, lens, out, dim**-0.5, None, None, *scales)
        calls.append(partial(kernels.paged_attention, *arguments))
    return seconds(calls)


def time_mla(num_seqs: int, context: int, num_queries: int, heads: int) -> float:
    """Seconds of one call with DeepSeek's dims. The queries are the last `num_queries` positions."""
    blocks, num_tokens = -(-context // 16), num_seqs * num_queries
    latent, rope, out = _randn(num_tokens, heads, 512), _randn(num_tokens, heads, 64), _randn(num_tokens, heads, 512)
    starts = torch.arange(num_seqs + 1, device="cuda", dtype=torch.int32) * num_queries
    lens = torch.full((num_seqs,), context, device="cuda", dtype=torch.int32)
    calls: list[Callable[[], Any]] = []
    for _ in range(max(1, min(16, _ROTATED_BYTES // (num_seqs * context * 1152)))):
        cache = _randn(num_seqs * blocks + 1, 16, 576)
        tables = (1 + torch.randperm(num_seqs * blocks, device="cuda")).int().view(num_seqs, blocks)
        calls.append(partial(kernels.mla_attention, latent, rope, cache, tables, starts, lens, out, 576**-0.5))
    return seconds(calls)


def mla_times(ceilings: dict[str, float]) -> dict[str, Any]:
    """Compare with the time for the latents' bytes, or for the products of scores and values."""
    result: dict[str, Any] = {}
    for heads, num_seqs, context in [(16, 1, 8192), (16, 64, 4096), (128, 1, 8192), (128, 64, 4096)]:
        work = 2 * num_seqs * heads * context * (576 + 512)
        floor = max(num_seqs * context * 1152 / ceilings["copy_bytes_per_s"], work / ceilings["flops"])
        spent = attempt(time_mla, num_seqs, context, 1, heads)
        result[f"decode {heads} heads {num_seqs} x {context}"] = _entry(spent, floor)
    floor = 16 * 4096 * 4096 * (576 + 512) / ceilings["flops"]
    result["prefill 16 heads 1 x 4096"] = _entry(attempt(time_mla, 1, 4096, 4096, 16), floor)
    return result


def attention_times(ceilings: dict[str, float]) -> dict[str, Any]:
    """Compare decode with the time for the bytes of keys and values, and prefill with the causal products."""
    result: dict[str, Any] = {}
    for num_seqs, context in [(1, 1024), (1, 8192), (1, 65536), (16, 1024), (64, 1024), (256, 1024), (64, 8192)]:
        floor = num_seqs * context * 8 * 128 * 2 * 2 / ceilings["copy_bytes_per_s"]
        result[f"decode {num_seqs} x {context}"] = _entry(attempt(time_attention, num_seqs, context, 1), floor)
    for num_seqs, context in [(1, 8192), (64, 1024), (64, 8192)]:
        floor = num_seqs * context * 8 * (128 + 4) * 2 / ceilings["copy_bytes_per_s"]
        for name, stored in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
            spent = attempt(time_attention, num_seqs, context, 1, stored)
            result[f"decode {name} {num_seqs} x {context}"] = _entry(spent, floor)
    for num_seqs, context in [(8, 1024), (1, 8192)]:
        floor = num_seqs * 4 * 32 * 128 * context * context / 2 / ceilings["flops"]
        result[f"prefill {num_seqs} x {context}"] = _entry(attempt(time_attention, num_seqs, context, context), floor)
    query, key = _randn(1, 32, 8192, 128), _randn(1, 8, 8192, 128)
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, query, key, key, is_causal=True, enable_gqa=True)
    result["torch sdpa, prefill 1 x 8192"] = _entry(attempt(seconds, [sdpa] * 2))
    return result


def small_times() -> dict[str, Any]:
    """Microseconds of a decode step's ops other than products, for 1 and 64 tokens of Llama-3.1-8B."""
    result: dict[str, Any] = {}
    for rows in (1, 64):
        x, residual, out, summed = (_randn(rows, 4096) for _ in range(4))
        weight = _randn(4096)
        gate_up, act, qkv, cache = (
            _randn(rows, 28672),
            _randn(rows, 14336),
            _randn(rows, 48, 128),
            _randn(64, 8, 16, 128),
        )
        positions, table = torch.arange(rows, device="cuda"), torch.randn(4096, 128, device="cuda")
        logits = torch.randn(rows, 128256, device="cuda")
        ids, values = torch.empty(rows, dtype=torch.int64, device="cuda"), torch.empty(rows, device="cuda")
        ones, top_k = torch.ones(rows, device="cuda"), torch.full((rows,), 50, device="cuda", dtype=torch.int32)
        rope = (qkv[:, :32], qkv[:, 32:40], qkv[:, 40:], cache, cache, positions, positions, table, False, None, None)
        filters = (ones, top_k, 0.9 * ones, 0.0 * ones, positions, positions, positions)
        calls: dict[str, Callable[[], Any]] = {
            "add_rms_norm": partial(kernels.rms_norm, x, weight, out, 1e-5, 0.0, residual, summed),
            "silu_mul": partial(kernels.activation, gate_up, act, "silu", True),
            "rope_and_write_kv": partial(kernels.rope_and_write_kv, *rope),
            "greedy_argmax": partial(kernels.greedy_argmax, logits, ids, values),
            "sample, top_k and top_p": partial(kernels.sample, logits, *filters, 0, ids),
        }
        for name, call in calls.items():
            result[f"{name} M={rows}"] = _entry(attempt(seconds, [call] * 10))
    return result


def run(ceilings: dict[str, float]) -> dict[str, Any]:
    """Measure the kernels that a dense model in bf16 calls."""
    return {
        "linear": attempt(linear_times, ceilings),
        "attention": attempt(attention_times, ceilings),
        "small": attempt(small_times),
    }
