"""The library's matrix products: for which numbers of rows they have our bits, and the cost of exact numerics."""

from __future__ import annotations

import time
from typing import Any

import torch

from shardline import LLM
from shardline.kernels.cuda.gpu_kernels import CudaKernels
from shardline.kernels.cuda.library import use_library
from shardline.kernels.cuda.library_trial import try_library
from shardline.kernels.cuda.triton.linear import launch_linear

from .bits import BUCKETS
from .engine import shape_folder, throughput_bar
from .inputs import attempt

_SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
"""Weight shapes of Llama-3.1-8B."""


def trial() -> dict[str, Any]:
    """Run the trial of a start. Then check that linears have our kernel's bits, even if the library computes them."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    device = torch.device("cuda")
    kernels = CudaKernels(device)
    try_library(_SHAPES, 128, torch.bfloat16, device, torch.cuda.mem_get_info()[0])  # compiles
    started = time.perf_counter()
    found = try_library(_SHAPES, 8192, torch.bfloat16, device, torch.cuda.mem_get_info()[0])
    spent = time.perf_counter() - started
    use_library(found)
    result: dict[str, Any] = {"start": {"s": spent, "ok": spent < 1.5}}
    for columns, depth in _SHAPES:
        weight, differing = torch.randn(columns, depth, device="cuda").bfloat16(), []
        for rows in BUCKETS:
            x, out = (kernels.activation_empty(torch.bfloat16, rows, width) for width in (depth, columns))
            x.normal_()
            kernels.linear(x, weight, None, out)
            expected = torch.full_like(out, torch.nan)
            launch_linear(x, weight, None, expected)
            if not torch.equal(out, expected):
                differing.append(rows)
        equal = sorted(found[columns, depth])
        result[f"{columns}x{depth}"] = {"ok": not differing, "differing": differing, "equal_sizes": equal}
    use_library({})
    return result


def fast_throughput(ceilings: dict[str, float]) -> dict[str, Any]:
    """Run the workload of `engine`'s bar with both numerics. Exact numerics may cost a tenth."""
    options: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "enable_prefix_caching": False}
    rates = {}
    for numerics in ("exact", "fast"):
        with (
            shape_folder("8B") as folder,
            LLM(folder, device="cuda", load_format="dummy", numerics=numerics, **options) as llm,
        ):
            rates[numerics] = throughput_bar(llm, ceilings)["tokens_per_s"]
    cost = 1.0 - rates["exact"] / rates["fast"]
    return {**rates, "cost": cost, "bar": 0.1, "met": cost <= 0.1}


def run(ceilings: dict[str, float]) -> dict[str, Any]:
    """Run both."""
    return {"trial": attempt(trial), "numerics": attempt(fast_throughput, ceilings)}
