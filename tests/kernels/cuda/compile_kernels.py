"""Compiles the Triton kernels for an H100 or H200 (sm_90), which needs no GPU, and prints what each became, as JSON.

The launchers run as they would on a GPU, on CPU tensors of real models' shapes in bf16; a launch compiles and stops.
Run in a process of its own: Triton must not be in interpreter mode.
"""

from __future__ import annotations

import bisect
import collections
import itertools
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from shardline.kernels.cuda.rows import UnnormedRows
from shardline.kernels.cuda.triton import attention as attention_kernels
from shardline.kernels.cuda.triton.gather import collect_columns, put_columns
from shardline.kernels.cuda.triton.gemm import Tile, use_generation
from shardline.kernels.cuda.triton.linear import add_linear, launch_linear, runs_of_row
from shardline.kernels.cuda.triton.qkv_linear import qkv_linear
from shardline.weights.formats.fp8 import Fp8Linear
from tests.kernels.cuda.helpers import KERNELS

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class _Driver:
    """Says what Triton asks the driver before it compiles."""

    def __init__(self, number: int = 90) -> None:
        self._number = number

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._number, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _compiled() -> Iterator[list[Any]]:
    """Collects what is compiled in its body instead of launching it."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return kernels[-1]

    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def fp8(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float8_e4m3fn)


def int8(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int8)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def attention(heads: int, kv_heads: int, dim: int, num_tokens: int, num_seqs: int, **options: Any) -> None:
    """A call with contexts of up to 2048 keys in blocks of 16."""
    stored = options.pop("stored", bf16)
    cache = stored(4, kv_heads, 16, dim)
    scales = () if stored == bf16 else (torch.empty(4, kv_heads, 16),) * 2
    query, out = bf16(num_tokens, heads, dim), bf16(num_tokens, heads, dim)
    window, softcap = options.pop("window", None), options.pop("softcap", None)
    tables, starts, lens = int32(num_seqs, 128), int32(num_seqs + 1), int32(num_seqs)
    KERNELS.paged_attention(query, cache, cache, tables, starts, lens, out, 0.1, window, softcap, *scales, **options)


def mla(heads: int, num_tokens: int, num_seqs: int, **options: Any) -> None:
    """A call of DeepSeek's dims, with contexts of up to 2048 keys in blocks of 16."""
    query, out, cache = bf16(num_tokens, heads, 192), bf16(num_tokens, heads, 512), bf16(4, 16, 576)
    tables, starts, lens = int32(num_seqs, 128), int32(num_seqs + 1), int32(num_seqs)
    attention_kernels.mla_attention(
        bf16(num_tokens, heads, 512), query[..., 128:], cache, tables, starts, lens, out, 0.1, **options
    )


def mla_fp8(num_tokens: int, num_seqs: int) -> None:
    """The same with latents in fp8, which are written too."""
    query, out, down = bf16(num_tokens, 16, 192), bf16(num_tokens, 16, 512), bf16(num_tokens, 576)
    cache = (fp8(4, 16, 512), bf16(4, 16, 64), torch.empty(4, 16))
    KERNELS.write_latent(down[:, :512], down[:, 512:], cache, torch.zeros(num_tokens, dtype=torch.int64))
    index = (int32(num_seqs, 128), int32(num_seqs + 1), int32(num_seqs))
    KERNELS.mla_attention(bf16(num_tokens, 16, 512), query[..., 128:], cache, *index, out, 0.1)


def write_latent() -> None:
    down = bf16(4, 576)
    KERNELS.write_latent(down[:, :512], down[:, 512:], bf16(4, 16, 576), torch.zeros(4, dtype=torch.int64))


def linear(rows: int, columns: int, depth: int, tile: Tile | None = None) -> None:
    x, weight, out = bf16(rows, depth), bf16(columns, depth), bf16(rows, columns)
    if tile is None:
        KERNELS.linear(x, weight, None, out)
    else:
        launch_linear(x, weight, None, out, tile=tile)


def gated_linear(rows: int, width: int, depth: int) -> None:
    KERNELS.linear(bf16(rows, depth), bf16(2 * width, depth), None, bf16(rows, width), "silu")


def few_rows(rows: int, hidden: int, inner: int | None, norm_heads: bool = False, dim: int = 128) -> None:
    """A layer's products in a decode step: of 32 heads, which have norms, or not; without `inner` only q, k and v."""
    cache, slots, table = bf16(8, 8, 16, dim), torch.zeros(rows, dtype=torch.int64), torch.empty(64, dim)
    residual, weight = bf16(rows, hidden), bf16(hidden)
    sums = torch.empty(rows, runs_of_row(rows, hidden, torch.bfloat16))
    unnormed = UnnormedRows(residual, sums, weight, 1e-6, 0.0)
    norms = (weight[:dim], weight[:dim], 1e-6, 0.0) if norm_heads else (None, None, 0.0, 0.0)
    qkv = bf16(48 * dim, hidden)
    for x in (unnormed, residual):  # the norm may have been a launch of its own
        qkv_linear(x, qkv, None, bf16(rows, 32, dim), cache, cache, slots, slots, table, False, *norms)
    if inner is None:
        return
    add_linear(bf16(rows, 4096), bf16(hidden, 4096), None, residual, bf16(rows, hidden), sums)
    KERNELS.linear(unnormed, bf16(2 * inner, hidden), None, bf16(rows, inner), "silu")
    add_linear(bf16(rows, inner), bf16(hidden, inner), None, residual, bf16(rows, hidden), sums)


def gather_columns() -> None:
    turns, peers, starts = int32(2), torch.zeros(4, dtype=torch.int64), int32(5)
    put_columns(bf16(64, 1024), bf16(2, 1 << 21), turns)
    collect_columns(peers, 1 << 21, None, 1024, bf16(64, 4096), turns)
    collect_columns(peers, 1 << 21, starts, 1100, bf16(64, 4096), turns)


def sample(num_rows: int, vocab_size: int) -> None:
    floats, ints = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    logits = torch.empty(num_rows, vocab_size)
    KERNELS.sample(logits, floats, int32(num_rows), floats, floats, ints, ints, ints, 0, ints)


def penalize(num_rows: int, vocab_size: int, num_entries: int) -> None:
    floats, logits, uncounted = torch.empty(num_rows), torch.empty(num_rows, vocab_size), torch.zeros(num_rows).long()
    ids, in_prompt = int32(num_entries), torch.zeros(num_entries, dtype=torch.bool)
    entries = (int32(num_rows + 1), ids, ids, in_prompt, torch.empty(num_entries))
    KERNELS.penalize(logits, floats, floats, floats, *entries, uncounted)


def logprobs(num_rows: int, vocab_size: int, top_n: int) -> None:
    floats, ints = torch.empty(num_rows), torch.zeros(num_rows, dtype=torch.int64)
    top = (torch.zeros(num_rows, top_n, dtype=torch.int64), torch.empty(num_rows, top_n))
    KERNELS.logprobs(torch.empty(num_rows, vocab_size), ints, top_n, floats, ints, *top)


def rope_and_write() -> None:
    qkv, cache = bf16(4, 48, 128), bf16(8, 8, 16, 128)
    positions, table = torch.zeros(4, dtype=torch.int64), torch.empty(64, 128)
    query, key, value = qkv.split([32, 8, 8], dim=1)
    KERNELS.rope_and_write_kv(query, key, value, cache, cache, positions, positions, table, False, None, None)


def write_kv_bytes(stored: Callable[..., torch.Tensor]) -> None:
    kv, cache, scales, slots = bf16(4, 8, 128), stored(8, 8, 16, 128), torch.empty(8, 8, 16), torch.zeros(4).long()
    KERNELS.write_kv(kv, kv, cache, cache, slots, scales, scales)


def norm_int8() -> None:
    x, weight, rows = bf16(4, 4096), bf16(4096), (int8(4, 4096), torch.empty(4), int32(4, 0))
    KERNELS.rms_norm(x, weight, rows, 1e-6, 0.0, x, bf16(4, 4096))


def linear_int8(rows: int, columns: int, depth: int) -> None:
    values, sums, floats = int8(rows, depth), int32(rows, 0), torch.empty(max(rows, columns))
    KERNELS.quantize_rows(bf16(rows, depth), values, floats, sums)
    KERNELS.linear_int8(values, floats, sums, depth, int8(columns, depth), floats, None, bf16(rows, columns))


def linear_int4(rows: int, columns: int, depth: int) -> None:
    panels, scales = torch.empty(depth // 64, 34 * columns, dtype=torch.uint8), torch.empty(columns)
    out = bf16(rows, columns)
    KERNELS.linear_int4(int8(rows, depth), torch.empty(rows), int32(rows, 0), depth, panels, scales, None, out)


def linear_w4a16(rows: int, columns: int, depth: int) -> None:
    values, zeros = (
        torch.empty(depth // size, columns, last, dtype=torch.uint8) for size, last in ((64, 32), (128, 1))
    )
    scales = torch.empty(depth // 128, columns, dtype=torch.float16)
    KERNELS.linear_w4a16(bf16(rows, depth), values, scales, zeros[..., 0], 128, None, bf16(rows, columns))


def experts_int4(num_tokens: int, num_experts: int, k: int, inner: int, hidden: int) -> None:
    panels = torch.empty(num_experts, hidden // 64, 34 * 2 * inner, dtype=torch.uint8)
    scales = torch.empty(num_experts, 2 * inner)
    ids, rows = int32(num_tokens, k), bf16(num_tokens * k, inner)
    KERNELS.expert_up(bf16(num_tokens, hidden), ids, 0, False, panels, scales, "silu", True, rows)


def experts(num_tokens: int, num_experts: int, k: int, inner: int, hidden: int) -> None:
    """Both products of a layer, as of Mixtral or Qwen3-MoE."""
    ids, weights = int32(num_tokens, k), torch.empty(num_tokens, k)
    up, down = bf16(num_experts, 2 * inner, hidden), bf16(num_experts, hidden, inner)
    rows, out = bf16(num_tokens * k, inner), bf16(num_tokens, hidden)
    KERNELS.expert_up(bf16(num_tokens, hidden), ids, 0, False, up, None, "silu", True, rows)
    KERNELS.expert_down(rows, ids, weights, 0, down, None, out, weights[:, 0], out)


def route(num_experts: int, k: int, num_groups: int = 1, top_groups: int = 1) -> None:
    ids, weights, slots = int32(4, k), torch.empty(4, k), torch.zeros(4, dtype=torch.int64)
    scores, counts = torch.empty(4, num_experts + 1), torch.zeros(num_experts, dtype=torch.int64)
    groups = (num_experts, num_groups, top_groups, num_groups > 1)
    KERNELS.route_experts(
        scores, scores[0], ids, weights, weights[:, 0], counts, num_groups > 1, True, 1.0, *groups, slots
    )


def linear_fp8(rows: int, columns: int, depth: int) -> None:
    Fp8Linear(KERNELS, fp8(columns, depth), torch.empty(columns), depth, columns)(bf16(rows, depth))


CASES: dict[str, Callable[[], None]] = {
    "rms_norm": lambda: KERNELS.rms_norm(
        bf16(4, 4096), bf16(4096), bf16(4, 4096), 1e-6, 0.0, bf16(4, 4096), bf16(4, 4096)
    ),
    "rms_norm_int8": norm_int8,
    "layer_norm": lambda: KERNELS.layer_norm(bf16(4, 1600), bf16(1600), bf16(1600), bf16(4, 1600), 1e-6, None, None),
    "rope": lambda: KERNELS.apply_rope(
        bf16(4, 32, 128), torch.zeros(4, dtype=torch.int64), torch.empty(64, 128), False
    ),
    "rope_and_write_kv": rope_and_write,
    "write_kv": lambda: KERNELS.write_kv(
        bf16(4, 8, 128), bf16(4, 8, 128), bf16(8, 8, 16, 128), bf16(8, 8, 16, 128), torch.zeros(4, dtype=torch.int64)
    ),
    "write_kv_int8": lambda: write_kv_bytes(int8),
    "write_kv_fp8": lambda: write_kv_bytes(fp8),
    "silu": lambda: KERNELS.activation(bf16(4, 28672), bf16(4, 14336), "silu", True),
    "gelu": lambda: KERNELS.activation(bf16(4, 4096), bf16(4, 4096), "gelu", False),
    "softcap": lambda: KERNELS.softcap(torch.empty(4, 256000), 30.0),
    "greedy_argmax": lambda: KERNELS.greedy_argmax(
        torch.empty(4, 128256), torch.empty(4, dtype=torch.int64), torch.empty(4)
    ),
    "row_digests": lambda: KERNELS.row_digests(torch.empty(4, 128256), torch.empty(4, dtype=torch.int64)),
    "sample": lambda: sample(4, 128256),
    "penalize": lambda: penalize(4, 128256, 1000),
    "logprobs": lambda: logprobs(4, 128256, 5),
    "linear_m1": lambda: linear(1, 6144, 4096),
    "linear_m1_wide": lambda: linear(1, 28672, 4096),
    "linear_m128": lambda: linear(128, 6144, 4096),
    "linear_m128_wide": lambda: linear(128, 28672, 4096),
    "linear_m2048": lambda: linear(2048, 6144, 4096),
    "linear_gated_m1": lambda: gated_linear(1, 14336, 4096),
    "linear_gated_m128": lambda: gated_linear(128, 14336, 4096),
    "linear_gated_m2048": lambda: gated_linear(2048, 14336, 4096),
    "few_rows_m1": lambda: few_rows(1, 4096, 14336),
    "few_rows_wide": lambda: few_rows(64, 8192, 28672),
    "few_rows_normed_heads": lambda: few_rows(1, 5120, None, norm_heads=True),
    "few_rows_wide_heads": lambda: few_rows(1, 2560, None, dim=256),
    "gather": gather_columns,
    "fp8_m1": lambda: linear_fp8(1, 6144, 4096),
    "fp8_m2048": lambda: linear_fp8(2048, 6144, 4096),
    "route": lambda: route(128, 8),
    "route_groups": lambda: route(256, 8, 8, 4),
    "experts_m1": lambda: experts(1, 128, 8, 768, 2048),
    "experts_m64": lambda: experts(64, 8, 2, 14336, 4096),
    "experts_m4096": lambda: experts(4096, 8, 2, 14336, 4096),
    "int8_m1": lambda: linear_int8(1, 6144, 4096),
    "int8_m2048": lambda: linear_int8(2048, 6144, 4096),
    "int4_m1": lambda: linear_int4(1, 6144, 4096),
    "int4_m2048": lambda: linear_int4(2048, 6144, 4096),
    "w4a16_m1": lambda: linear_w4a16(1, 6144, 4096),
    "w4a16_m2048": lambda: linear_w4a16(2048, 6144, 4096),
    "int4_experts": lambda: experts_int4(64, 128, 8, 768, 2048),
    "linear_heads_m1": lambda: KERNELS.linear_heads(bf16(1, 16, 192)[..., :128], bf16(16, 512, 128), bf16(1, 16, 512)),
    "linear_heads_m2048": lambda: KERNELS.linear_heads(bf16(2048, 16, 512), bf16(16, 128, 512), bf16(2048, 16, 128)),
    "write_latent": write_latent,
    "attention_mla_decode": lambda: mla(128, 64, 64, spread_splits=False),
    "attention_mla_spread": lambda: mla(16, 1, 1),
    "attention_mla_prefill": lambda: mla(16, 2048, 4),
    "attention_mla_fp8_decode": lambda: mla_fp8(64, 64),
    "attention_mla_fp8_prefill": lambda: mla_fp8(2048, 4),
    "linear_odd_depth": lambda: linear(64, 896, 2056),
    "attention_decode": lambda: attention(32, 8, 128, 64, 64, spread_splits=False),
    "attention_decode_spread": lambda: attention(32, 8, 128, 1, 1),
    "attention_prefill": lambda: attention(32, 8, 128, 2048, 4),
    "attention_prefill_64": lambda: attention(32, 8, 64, 2048, 4, window=4096),
    "attention_prefill_256": lambda: attention(16, 8, 256, 2048, 4, window=4096, softcap=50.0),
    "attention_decode_int8": lambda: attention(32, 8, 128, 64, 64, spread_splits=False, stored=int8),
    "attention_prefill_int8": lambda: attention(32, 8, 128, 2048, 4, stored=int8),
    "attention_decode_fp8_spread": lambda: attention(32, 8, 128, 1, 1, stored=fp8),
    "attention_prefill_fp8": lambda: attention(32, 8, 128, 2048, 4, stored=fp8),
}


_COUNTED = re.compile(r"\b(HGMMA|QGMMA|IGMMA|HMMA|QMMA|IMMA|FFMA|LDGSTS\.[\w.]*|LDL|STL)\b")
"""Instructions that matter."""
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/(.*)$", re.MULTILINE)


def describe(kernels: list[Any], *, for_people: bool) -> list[dict[str, Any]]:
    """Their shared memory, and how often they have the instructions that matter; for people, their registers too."""
    opcodes = count_opcodes([code_of(kernel.asm["cubin"]) for kernel in kernels])
    described = []
    for kernel, counts in zip(kernels, opcodes, strict=True):
        usage = run_tool("cuobjdump", "--dump-resource-usage", content=kernel.asm["cubin"]) if for_people else ""
        described.append(
            {
                "name": kernel.metadata.name,
                "shared_bytes": kernel.metadata.shared,
                **{name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)},
                "opcodes": dict(counts),
            }
        )
    return described


def run_tool(name: str, *options: str, content: bytes) -> str:
    """What a tool prints about a file with this content."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        done = subprocess.run([_TOOLS / name, *options, file.name], capture_output=True, text=True, check=True)
    return done.stdout


def code_of(cubin: bytes) -> bytes:
    """The instructions of a kernel: the section .text.NAME of its ELF file."""
    (sections_begin,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, sections_begin + index * size) for index in range(count)]
    names_begin = sections[names][4]
    [(_, _, _, _, begin, length)] = [
        section for section in sections if cubin.startswith(b".text.", names_begin + section[0])
    ]
    return cubin[begin : begin + length]


def count_opcodes(codes: list[bytes]) -> list[collections.Counter[str]]:
    """Of each kernel. All are disassembled as one, because the disassembler takes half a second to start."""
    ends = list(itertools.accumulate(map(len, codes)))
    counts: list[collections.Counter[str]] = [collections.Counter() for _ in codes]
    for address, text in _INSTRUCTION.findall(run_tool("nvdisasm", "-b", "SM90a", content=b"".join(codes))):
        counts[bisect.bisect_right(ends, int(address, 16))].update(_COUNTED.findall(text))
    return counts


def print_shared_bytes(number: int, names: list[str]) -> None:
    driver.set_active(_Driver(number))
    use_generation(f"sm_{number}")
    found = {}
    for name in names:
        with _compiled() as kernels:
            CASES[name]()
        found[name] = [kernel.metadata.shared for kernel in kernels]
    json.dump(found, sys.stdout)


def main() -> None:
    for_people = sys.argv[1:2] != ["--part"]
    match sys.argv[1:]:
        case ["--fits", number, *names]:  # the shared memory of cases on another generation, sm_NUMBER
            print_shared_bytes(int(number), names)
            return
        case ["--part", part, parts]:  # one of so many parts, for the test
            wanted = list(CASES)[int(part) :: int(parts)]
        case names:
            wanted = names or list(CASES)
    driver.set_active(_Driver())
    cases, compiled = [], []
    for name in wanted:
        with _compiled() as kernels:
            CASES[name]()
        cases += [name] * len(kernels)
        compiled += kernels
    result: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    for name, kernel in zip(cases, describe(compiled, for_people=for_people), strict=True):
        result[name].append(kernel)
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
