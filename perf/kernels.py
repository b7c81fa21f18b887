"""The GEMM kernels compared with torch and with the machine: `python perf/kernels.py`.

For each shape and number of rows M, it prints our GOP/s, torch's GOP/s in the same process, and the ratio. For bf16
and int4 torch runs its bf16 linear; for int8 it runs `torch._int_mm`, or the bf16 linear below 128 rows. For M = 1, it
prints GB/s of weights as a share of the read bandwidth of `torch.sum`. Calls alternate, and figures are medians. Every
call uses the next of several copies of the weight, so weights come from memory, as in a model. Last, it compares gate
and up with SiLU in one kernel with two ops. With `--threads 1` it measures the thread's CPU time, which other programs
on the machine disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from shardline import _cpu
from shardline.kernels.host.kernels import HostKernels
from shardline.kernels.host.memory import streamed_empty
from shardline.runtime.ops.activation import gated_activation
from shardline.weights.base import weight_format
from shardline.weights.formats import plain
from shardline.weights.rows import quantize_rows
from shardline.weights.scaled import ScaledFormat

SHAPES = {
    "q05": [(1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896)],
    "llama1b": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)],
}
GATE_UP = {"q05": (9728, 896), "llama1b": (16384, 2048)}
ROWS = (1, 8, 32, 128, 512, 2048)
FORMATS = {"bf16": "plain", "int8": "int8_fast", "int4": "int4_fast"}
DTYPES = tuple(FORMATS)
KERNELS = HostKernels()
COLD_BYTES = 96 << 20  # of all copies: more than the caches hold
MIN_SECONDS = 0.02  # of calls per measurement
SETTLE_SECONDS = 0.1  # of calls before a measurement: the other library's idle threads spin on our cores for a while

Call = Callable[[], object]


def seconds_per_call(call: Call) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    settled = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < settled:
        call()
    count, started = 0, clock()
    while True:
        call()
        count += 1
        elapsed = clock() - started
        if elapsed > MIN_SECONDS:
            return elapsed / count


def medians(calls: Sequence[Call], rounds: int) -> list[float]:
    """Median seconds of each call. The calls are measured in turns."""
    times = [[seconds_per_call(call) for call in calls] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def cold_copies(panels: Tensor) -> list[Tensor]:
    """Copies on huge pages, where packed weights are too."""
    count = COLD_BYTES // panels.nbytes
    return [streamed_empty(tuple(panels.shape), panels.dtype).copy_(panels) for _ in range(count)]


def our_call(dtype: str, x: Tensor, weight: Tensor) -> tuple[Call, int]:
    """A call of the kernel with copies of a packed weight, and the bytes of one copy."""
    if dtype == "bf16":
        bf16 = plain.Format().pack_linear(KERNELS, weight)
        turn = cycle([bf16, *(replace(bf16, panels=p) for p in cold_copies(bf16.panels))])
        return lambda: next(turn)(x), bf16.nbytes
    rows = quantize_rows(KERNELS, x)
    form = weight_format(FORMATS[dtype])
    assert isinstance(form, ScaledFormat)
    packed = form.pack_linear(KERNELS, weight).weight
    copies = cycle([packed, *(replace(packed, panels=p) for p in cold_copies(packed.panels))])
    return lambda: next(copies).multiply(rows, None, x.dtype), packed.nbytes


def torch_call(dtype: str, x: Tensor, weight: Tensor) -> Call:
    if dtype == "int8" and len(x) >= 128:
        rows, columns = x.to(torch.int8), weight.to(torch.int8).T.contiguous()
        return lambda: torch._int_mm(rows, columns)
    copies = cycle([weight.clone() for _ in range(1 + COLD_BYTES // weight.nbytes)])
    return lambda: torch.nn.functional.linear(x, next(copies))


def read_bandwidth(rounds: int) -> float:
    """Bytes per second of `torch.sum` over more memory than the caches hold: the best of some rounds."""
    memory = torch.ones(64 << 20)
    return memory.nbytes / min(seconds_per_call(memory.sum) for _ in range(rounds))


def report(dtype: str, n: int, k: int, m: int, bandwidth: float, rounds: int) -> str:
    weight = torch.randn(n, k).to(torch.bfloat16)
    x = torch.randn(m, k).to(torch.bfloat16)
    ours, weight_bytes = our_call(dtype, x, weight)
    own, theirs = medians([ours, torch_call(dtype, x, weight)], rounds)
    line = f"{dtype} N={n:6d} K={k:5d} M={m:5d}"
    if m == 1:
        rate = weight_bytes / own
        return f"{line} {rate / 1e9:7.1f} GB/s, {rate / bandwidth:4.0%} of reads; {theirs / own:5.2f} x torch"
    giga_ops = 2 * m * n * k / 1e9
    return f"{line} {giga_ops / own:7.0f} GOP/s, torch {giga_ops / theirs:7.0f}; {theirs / own:5.2f} x"


def report_gated(dtype: str, n: int, k: int, m: int, rounds: int) -> str:
    """Compare gate and up (n / 2 columns each) fused with SiLU with a linear and a separate activation."""
    form = weight_format(FORMATS[dtype])
    gate, up = torch.randn(n, k).to(torch.bfloat16).chunk(2)
    x = torch.randn(m, k).to(torch.bfloat16)
    copies = 1 + COLD_BYTES // form.pack_gated(KERNELS, gate, up).nbytes
    fused = cycle([form.pack_gated(KERNELS, gate, up) for _ in range(copies)])
    separate = cycle([form.pack_linear(KERNELS, torch.cat([gate, up])) for _ in range(copies)])
    own, two_ops = medians(
        [lambda: next(fused)(x, None, "silu"), lambda: gated_activation(KERNELS, next(separate)(x), "silu")], rounds
    )
    giga_ops = 2 * m * n * k / 1e9
    line = f"{dtype} N={n:6d} K={k:5d} M={m:5d}"
    return f"{line} {giga_ops / own:7.0f} GOP/s with SiLU; {two_ops / own:5.2f} x two ops"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=SHAPES, default="q05")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _cpu.set_num_threads(args.threads)
    bandwidth = read_bandwidth(args.rounds)
    print(f"{args.threads} threads, reads {bandwidth / 1e9:.1f} GB/s", flush=True)
    for dtype in args.dtypes:
        for n, k in SHAPES[args.model]:
            for m in args.rows:
                if n < 100_000 or m <= 32:  # only sampled rows reach the vocabulary
                    print(report(dtype, n, k, m, bandwidth, args.rounds), flush=True)
        n, k = GATE_UP[args.model]
        for m in args.rows:
            print(report_gated(dtype, n, k, m, args.rounds), flush=True)


if __name__ == "__main__":
    main()
