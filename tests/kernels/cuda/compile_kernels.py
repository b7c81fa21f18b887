"""Compiles the Triton kernels, which needs no GPU, and prints what each became, as JSON.

The launchers run as they would on a GPU, on CPU tensors of real models' shapes in bf16 (in fp32 for generations without
it); a launch compiles and stops. Without `--on`, it is one on an H100 or H200 (sm_90). `--on sm_80 gfx942:linear_m1 …`
compiles for other generations all cases that they compute, or one. Run in a process of its own: Triton must not be in
interpreter mode.
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

from shardline.deployment.generations import generations
from shardline.kernels.cuda.triton import attention as attention_kernels
from shardline.kernels.cuda.triton.gather import collect_columns, put_columns
from shardline.kernels.cuda.triton.gemm import Tile
from shardline.kernels.cuda.triton.launch import use_generation
from shardline.kernels.cuda.triton.linear import launch_linear
from shardline.kernels.tensors import QuantizedLatents
from shardline.weights.formats.fp8 import Fp8Linear
from tests.kernels.cuda.helpers import KERNELS

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class _Driver:
    """Says what Triton asks the driver before it compiles. Each generation is another device."""

    def __init__(self, generation: str = "sm_90") -> None:
        self._generation = generation

    def get_current_target(self) -> GPUTarget:
        if self._generation.startswith("sm_"):
            return GPUTarget("cuda", int(self._generation[3:]), 32)
        return GPUTarget("hip", self._generation, 32 if self._generation.startswith("gfx1") else 64)

    def get_current_device(self) -> int:
        return list(generations()).index(self._generation)

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


_dtype = torch.bfloat16


def acts(*shape: int) -> torch.Tensor:
    """Activations, or weights in their dtype."""
    return torch.empty(shape, dtype=_dtype)


def fp8(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float8_e4m3fn)


def int8(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int8)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def attention(heads: int, kv_heads: int, dim: int, num_tokens: int, num_seqs: int, **options: Any) -> None:
    """A call with contexts of up to 2048 keys in blocks of 16."""
    stored = options.pop("stored", acts)
    cache = stored(4, kv_heads, 16, dim)
    scales = () if stored == acts else (torch.empty(4, kv_heads, 16),) * 2
    query, out = acts(num_tokens, heads, dim), acts(num_tokens, heads, dim)
    window, softcap = options.pop("window", None), options.pop("softcap", None)
    tables, starts, lens = int32(num_seqs, 128), int32(num_seqs + 1), int32(num_seqs)
    KERNELS.paged_attention(query, cache, cache, tables, starts, lens, out, 0.1, window, softcap, *scales, **options)


def mla(heads: int, num_tokens: int, num_seqs: int, **options: Any) -> None:
    """A call of DeepSeek's dims, with contexts of up to 2048 keys in blocks of 16."""
    query, out, cache = acts(num_tokens, heads, 192), acts(num_tokens, heads, 512), acts(4, 16, 576)
    tables, starts, lens = int32(num_seqs, 128), int32(num_seqs + 1), int32(num_seqs)
    attention_kernels.mla_attention(
        acts(num_tokens, heads, 512), query[..., 128:], cache, tables, starts, lens, out, 0.1, **options
    )


def mla_fp8(num_tokens: int, num_seqs: int) -> None:
    """The same with latents in fp8, which are written too."""
    query, out, down = acts(num_tokens, 16, 192), acts(num_tokens, 16, 512), acts(num_tokens, 576)
    cache = QuantizedLatents(fp8(4, 16, 512), acts(4, 16, 64), torch.empty(4, 16))
    KERNELS.write_latent(down[:, :512], down[:, 512:], cache, torch.zeros(num_tokens, dtype=torch.int64))
    index = (int32(num_seqs, 128), int32(num_seqs + 1), int32(num_seqs))
    KERNELS.mla_attention(acts(num_tokens, 16, 512), query[..., 128:], cache, *index, out, 0.1)


def write_latent() -> None:
    down = acts(4, 576)
    KERNELS.write_latent(down[:, :512], down[:, 512:], acts(4, 16, 576), torch.zeros(4, dtype=torch.int64))


def linear(rows: int, columns: int, depth: int, tile: Tile | None = None) -> None:
    x, weight, out = acts(rows, depth), acts(columns, depth), acts(rows, columns)
    if tile is None:
        KERNELS.linear(x, weight, None, out)
    else:
        launch_linear(x, weight, None, out, tile=tile)


def gated_linear(rows: int, width: int, depth: int) -> None:
    KERNELS.linear(acts(rows, depth), acts(2 * width, depth), None, acts(rows, width), "silu")


def gather_columns() -> None:
    turns, peers, starts = int32(2), torch.zeros(4, dtype=torch.int64), int32(5)
    put_columns(acts(64, 1024), acts(2, 1 << 21), turns)
    collect_columns(peers, 1 << 21, None, 1024, acts(64, 4096), turns)
    collect_columns(peers, 1 << 21, starts, 1100, acts(64, 4096), turns)


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
    qkv, cache = acts(4, 48, 128), acts(8, 8, 16, 128)
    positions, table = torch.zeros(4, dtype=torch.int64), torch.empty(64, 128)
    query, key, value = qkv.split([32, 8, 8], dim=1)
    KERNELS.rope_and_write_kv(query, key, value, cache, cache, positions, positions, table, False, None, None)


def write_kv_bytes(stored: Callable[..., torch.Tensor]) -> None:
    kv, cache, scales, slots = acts(4, 8, 128), stored(8, 8, 16, 128), torch.empty(8, 8, 16), torch.zeros(4).long()
    KERNELS.write_kv(kv, kv, cache, cache, slots, scales, scales)


def norm_int8() -> None:
    x, weight, rows = acts(4, 4096), acts(4096), (int8(4, 4096), torch.empty(4), int32(4, 0))
    KERNELS.rms_norm(x, weight, rows, 1e-6, 0.0, x, acts(4, 4096))


def linear_int8(rows: int, columns: int, depth: int) -> None:
    values, sums, floats = int8(rows, depth), int32(rows, 0), torch.empty(max(rows, columns))
    KERNELS.quantize_rows(acts(rows, depth), values, floats, sums)
    KERNELS.linear_int8(values, floats, sums, depth, int8(columns, depth), floats, None, acts(rows, columns))


def linear_int4(rows: int, columns: int, depth: int) -> None:
    panels, scales = torch.empty(depth // 64, 34 * columns, dtype=torch.uint8), torch.empty(columns)
    out = acts(rows, columns)
    KERNELS.linear_int4(int8(rows, depth), torch.empty(rows), int32(rows, 0), depth, panels, scales, None, out)


def linear_w4a16(rows: int, columns: int, depth: int) -> None:
    values, zeros = (
        torch.empty(depth // size, columns, last, dtype=torch.uint8) for size, last in ((64, 32), (128, 1))
    )
    scales = torch.empty(depth // 128, columns, dtype=torch.float16)
    KERNELS.linear_w4a16(acts(rows, depth), values, scales, zeros[..., 0], 128, None, acts(rows, columns))


def experts_int4(num_tokens: int, num_experts: int, k: int, inner: int, hidden: int) -> None:
    panels = torch.empty(num_experts, hidden // 64, 34 * 2 * inner, dtype=torch.uint8)
    scales = torch.empty(num_experts, 2 * inner)
    ids, rows = int32(num_tokens, k), acts(num_tokens * k, inner)
    KERNELS.expert_up(acts(num_tokens, hidden), ids, 0, False, panels, scales, "silu", True, rows)


def experts(num_tokens: int, num_experts: int, k: int, inner: int, hidden: int) -> None:
    """Both products of a layer, as of Mixtral or Qwen3-MoE."""
    ids, weights = int32(num_tokens, k), torch.empty(num_tokens, k)
    up, down = acts(num_experts, 2 * inner, hidden), acts(num_experts, hidden, inner)
    rows, out = acts(num_tokens * k, inner), acts(num_tokens, hidden)
    KERNELS.expert_up(acts(num_tokens, hidden), ids, 0, False, up, None, "silu", True, rows)
    KERNELS.expert_down(rows, ids, weights, 0, down, None, out, weights[:, 0], out)


def route(num_experts: int, k: int, num_groups: int = 1, top_groups: int = 1) -> None:
    ids, weights, slots = int32(4, k), torch.empty(4, k), torch.zeros(4, dtype=torch.int64)
    scores, counts = torch.empty(4, num_experts + 1), torch.zeros(num_experts, dtype=torch.int64)
    groups = (num_experts, num_groups, top_groups, num_groups > 1)
    KERNELS.route_experts(
        scores, scores[0], ids, weights, weights[:, 0], counts, num_groups > 1, True, 1.0, *groups, slots
    )


def linear_fp8(rows: int, columns: int, depth: int) -> None:
    Fp8Linear(KERNELS, fp8(columns, depth), torch.empty(columns), depth, columns)(acts(rows, depth))


CASES: dict[str, Callable[[], None]] = {
    "rms_norm": lambda: KERNELS.rms_norm(
        acts(4, 4096), acts(4096), acts(4, 4096), 1e-6, 0.0, acts(4, 4096), acts(4, 4096)
    ),
    "rms_norm_int8": norm_int8,
    "layer_norm": lambda: KERNELS.layer_norm(acts(4, 1600), acts(1600), acts(1600), acts(4, 1600), 1e-6, None, None),
    "rope": lambda: KERNELS.apply_rope(
        acts(4, 32, 128), torch.zeros(4, dtype=torch.int64), torch.empty(64, 128), False
    ),
    "rope_and_write_kv": rope_and_write,
    "write_kv": lambda: KERNELS.write_kv(
        acts(4, 8, 128),
        acts(4, 8, 128),
        acts(8, 8, 16, 128),
        acts(8, 8, 16, 128),
        torch.zeros(4, dtype=torch.int64),
    ),
    "write_kv_int8": lambda: write_kv_bytes(int8),
    "write_kv_fp8": lambda: write_kv_bytes(fp8),
    "silu": lambda: KERNELS.activation(acts(4, 28672), acts(4, 14336), "silu", True),
    "gelu": lambda: KERNELS.activation(acts(4, 4096), acts(4, 4096), "gelu", False),
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
    "linear_gated_m32": lambda: gated_linear(32, 14336, 4096),
    "linear_gated_m128": lambda: gated_linear(128, 14336, 4096),
    "linear_gated_m2048": lambda: gated_linear(2048, 14336, 4096),
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
    "linear_heads_m1": lambda: KERNELS.linear_heads(acts(1, 16, 192)[..., :128], acts(16, 512, 128), acts(1, 16, 512)),
    "linear_heads_m2048": lambda: KERNELS.linear_heads(acts(2048, 16, 512), acts(16, 128, 512), acts(2048, 16, 128)),
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


_COUNTED = re.compile(r"\b(HGMMA|QGMMA|IGMMA|HMMA|QMMA|IMMA|UTC[HQI]MMA|FFMA|LDGSTS\.[\w.]*|LDL|STL)\b")
"""Instructions that matter."""
_MATRIX = re.compile(r"[HQI](G?)MMA|UTC[HQI]MMA")
_AMD_MATRIX = re.compile(r"^\s*v_(?:mfma|wmma|smfmac)_", re.MULTILINE)
_AMD_SPILLS = re.compile(r"^\s*\.vgpr_spill_count:\s*(\d+)", re.MULTILINE)
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


def count_opcodes(codes: list[bytes], number: int = 90) -> list[collections.Counter[str]]:
    """Of each kernel for sm_`number`. All are disassembled as one: the disassembler takes half a second to start."""
    ends = list(itertools.accumulate(map(len, codes)))
    counts: list[collections.Counter[str]] = [collections.Counter() for _ in codes]
    architecture = f"SM{number}{'a' if number >= 90 else ''}"
    for address, text in _INSTRUCTION.findall(run_tool("nvdisasm", "-b", architecture, content=b"".join(codes))):
        counts[bisect.bisect_right(ends, int(address, 16))].update(_COUNTED.findall(text))
    return counts


def computes(generation: str, case: str) -> bool:
    """Whether a generation computes in the formats of a case."""
    native, name = generations()[generation].native, f"{case}_"
    needs = {"bytes": "_int8_" in f"_{name}" or "_int4_" in f"_{name}", "e4m3": "_fp8_" in f"_{name}"}
    return all(format in native for format, is_needed in needs.items() if is_needed)


def compile_on(generation: str, names: list[str]) -> list[dict[str, Any]]:
    """What became of cases on a generation: for each launch its case, its kernel, bytes of shared memory, whether it
    has instructions for matrices and copies that nobody waits for, and what it spills."""
    global _dtype
    _dtype = torch.bfloat16 if "bfloat16" in generations()[generation].native else torch.float32
    driver.set_active(_Driver(generation))
    use_generation(generation)
    cases, compiled = [], []
    for name in names:
        with _compiled() as kernels:
            CASES[name]()
        cases += [name] * len(kernels)
        compiled += kernels
    if generation.startswith("sm_"):
        counts = count_opcodes([code_of(kernel.asm["cubin"]) for kernel in compiled], int(generation[3:]))
        looked = [
            {
                "matrix": sum(count for name, count in opcodes.items() if _MATRIX.fullmatch(name)),
                "copies": sum(count for name, count in opcodes.items() if name.startswith("LDGSTS")),
                "spills": opcodes["LDL"] + opcodes["STL"],
            }
            for opcodes in counts
        ]
    else:
        texts = [kernel.asm["amdgcn"] for kernel in compiled]
        looked = [
            {
                "matrix": len(_AMD_MATRIX.findall(text)),
                "copies": 0,
                "spills": sum(map(int, _AMD_SPILLS.findall(text))),
            }
            for text in texts
        ]
    return [
        {"case": case, "name": kernel.metadata.name, "shared_bytes": kernel.metadata.shared, **one}
        for case, kernel, one in zip(cases, compiled, looked, strict=True)
    ]


def main() -> None:
    for_people = sys.argv[1:2] != ["--part"]
    match sys.argv[1:]:
        case ["--on", *words]:  # generations, or single cases of them
            asked = collections.defaultdict[str, list[str]](list)
            for generation, _, case in (word.partition(":") for word in words):
                asked[generation] += [case] if case else [name for name in CASES if computes(generation, name)]
            json.dump({name: compile_on(name, cases) for name, cases in asked.items()}, sys.stdout)
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
