"""Records what the engine answers, bit by bit, so that two states of the code can be compared.

    python scripts/record_digests.py OUT.json                  # record; --only TEXT takes the cases whose name has it
    python scripts/record_digests.py --compare A.json B.json   # say what differs; exit 1 if anything does

A case is a checkpoint with engine options. Its record holds, for every request, the tokens, a hash of the digests of
the fp32 logits of every step, a hash of the log-probabilities, and the finish reason. The cases cover every model
family in float32 and bfloat16 with every weight format and KV format of the CPU, packed checkpoints, layouts of
several ranks (as threads), every instruction set of this CPU, and the GPU's kernels in Triton's interpreter.
Run it from anywhere with the test extras installed; it imports `shardline` from src/ and `tests` from this checkout.

The engines run in this script's own processes, since starting one process per case would take too long. Functions of
the engine that are not public are used in `start_engine` and `use_gpu_kernels` only.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

VOCAB_SIZE = 256
Record = dict[str, Any]


# ── What depends on the engine's inside ──────────────────────────────────────────────────────────────────────────────


class RunningEngine(Protocol):
    """What the rest of this script asks of an engine."""

    def add(self, request: Any) -> None:
        """Queue a `shardline.types.Request`."""

    def step(self) -> Sequence[Any]:
        """Run one step; the `shardline.types.SequenceOutput` of its requests."""

    def is_busy(self) -> bool: ...
    def close(self) -> None: ...


def start_engine(options: dict[str, Any]) -> RunningEngine:
    """An engine in this process with `EngineConfig` options: one rank, or ranks that are threads.

    Formats that only a GPU has (fp8, w4a16) are accepted when `use_gpu_kernels` was called before.
    """
    from shardline import EngineConfig
    from shardline.engine.engine import Engine
    from shardline.engine.executor import make_executor
    from shardline.engine.resolve import resolve
    from shardline.runtime.setup import prepare

    on_gpu = "TRITON_INTERPRET" in os.environ
    refused = ("fp8", "w4a16", "int8") if on_gpu and "deepseek" in options["model"] else ("fp8", "w4a16")
    gpu_only = {name: value for name, value in options.items() if value in refused}
    asked = EngineConfig.from_options(**{name: value for name, value in options.items() if name not in gpu_only})
    config = resolve(asked)
    if "quantization" in gpu_only:
        scheme = "w4a16_32" if gpu_only["quantization"] == "w4a16" else gpu_only["quantization"]
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, quantization=scheme))
    if "kv_cache_dtype" in gpu_only:
        cache = dataclasses.replace(config.cache, kv_cache_dtype=gpu_only["kv_cache_dtype"])
        config = dataclasses.replace(config, cache=cache)
    setup = prepare(config)
    executor = make_executor(setup)
    executor.start()
    engine = Engine(setup, executor)

    class Adapter:
        add = staticmethod(engine.add)
        step = staticmethod(engine.step)
        close = staticmethod(executor.close)

        @staticmethod
        def is_busy() -> bool:
            return engine.busy

    return Adapter()


def use_gpu_kernels() -> None:
    """From here on, every rank is a GPU in Triton's interpreter, with its memory in the host's.

    TRITON_INTERPRET=1 must have been set before the process started.
    """
    import numpy as np
    from tests.backends.cuda import conftest as hardware
    from tests.backends.cuda.helpers import InterpretedBackend
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    from shardline.runtime import backends
    from shardline.runtime.backends.base import Backend
    from shardline.runtime.backends.host.backend import use_threads

    InterpreterBuilder.create_dot = hardware._dot
    InterpreterBuilder.create_fma = hardware._fma
    InterpreterBuilder.create_si_to_fp = hardware._integers_to_float
    interpreter._convert_float = hardware._rounded
    # Ranks may be threads, and the interpreter keeps the place of the running program in a global.
    lock, run_grid = threading.Lock(), GridExecutor.__call__

    def run_locked(self: GridExecutor, *arguments: Any, **keywords: Any) -> None:
        with lock, np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            run_grid(self, *arguments, **keywords)

    GridExecutor.__call__ = run_locked

    def open_backend(kind: str, rank: int, threads: int) -> Backend:
        use_threads(threads)
        return InterpretedBackend()

    backends.open_backend = open_backend


# ── Cases ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Case:
    """A checkpoint with engine options, and the requests that it gets."""

    group: str
    """The process that runs it: its name begins with "cpu", "triton", "llm" or "isa:<name>"."""
    checkpoint: str
    options: dict[str, Any] = field(default_factory=dict)
    requests: str = "mixed"
    """A function of `REQUESTS`."""

    @property
    def name(self) -> str:
        room = self.group.split("/")[0]
        return " ".join([room, self.checkpoint, *(f"{key}={value}" for key, value in self.options.items())])


_FORMATS = [(dtype, weights) for dtype in ("float32", "bfloat16") for weights in ("none", "int8", "int4")]
_LAYOUT_FORMATS = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("float32", "int4"))
PACKED_MODELS = ("llama-gptq", "llama-awq", "mixtral-gptq", "mixtral-awq")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "fast": {"tensor_parallel_size": 2, "numerics": "fast"},
    "tp3": {"tensor_parallel_size": 3},
    "tp2 pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp2 ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "dp2 ep": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "tp2 dp2 ep": {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
}

GPU_CASES: list[tuple[str, str, str, str]] = [
    ("llama", "float32", "none", "auto"),
    ("llama", "bfloat16", "none", "auto"),
    ("llama", "float32", "int8", "auto"),
    ("llama", "bfloat16", "int4", "int8"),
    ("llama", "float32", "fp8", "auto"),
    ("llama-gptq", "float32", "w4a16", "auto"),
    ("llama-awq", "bfloat16", "w4a16", "auto"),
    ("mixtral-gptq", "float32", "w4a16", "auto"),
    ("mistral", "float32", "none", "int8"),
    ("mistral", "float32", "none", "fp8"),
    ("qwen2", "bfloat16", "none", "auto"),
    ("qwen3", "bfloat16", "int8", "auto"),
    ("gemma", "bfloat16", "none", "auto"),
    ("gemma2", "float32", "none", "auto"),
    ("gemma3_text", "bfloat16", "fp8", "auto"),
    ("phi3", "float32", "int4", "auto"),
    ("gpt2", "float32", "none", "auto"),
    ("gpt2", "bfloat16", "int8", "auto"),
    ("mixtral", "float32", "none", "auto"),
    ("mixtral", "bfloat16", "int8", "auto"),
    ("qwen2_moe", "bfloat16", "none", "auto"),
    ("qwen2_moe", "float32", "int4", "auto"),
    ("qwen3_moe", "bfloat16", "fp8", "auto"),
    ("deepseek_v2", "float32", "none", "fp8"),
    ("deepseek_v2", "bfloat16", "int8", "int8"),
    ("deepseek_v3", "float32", "none", "auto"),
    ("deepseek_v3", "bfloat16", "int4", "auto"),
]
"""Checkpoint, dtype, weight format, KV format."""

GPU_ROWS = [("llama", "bfloat16", "none"), ("llama", "float32", "int8"), ("mixtral", "float32", "none")]
"""Cases whose prompt is one step of more than 64 rows, the largest number of rows that layers fuse."""

GPU_LAYOUTS = [("llama", "bfloat16", "tp2"), ("mixtral", "float32", "tp2 ep")]
ISAS = ("portable", "avx2", "avx512", "avx512_bf16")
_LONG = {"num_hidden_layers": 2, "max_position_embeddings": 1024, "hidden_size": 288, "intermediate_size": 592}
LONG_SHAPES: dict[str, dict[str, Any]] = {
    "gemma2": {**_LONG, "sliding_window": 300},
    "gpt2": {"n_layer": 2, "n_positions": 1024, "n_embd": 288},
    "deepseek_v3": {**_LONG, "kv_lora_rank": 96, "moe_intermediate_size": 80},
}
"""Shapes for prompts that cross a bound of attention's splits (512 keys), and for layers of many tiles."""
PACKED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
}


def make_cases() -> list[Case]:
    """All cases, those of a group together."""
    from tests.models.checkpoints import FAMILIES

    cases = [Case("llm", "llama", {"dtype": "bfloat16", "quantization": "int8"}, "short")]
    cases.append(Case("llm", "mixtral", {"dtype": "float32", "tensor_parallel_size": 2}, "short"))
    cases += _gpu_cases()
    for index, family in enumerate((*FAMILIES, *PACKED_MODELS)):
        for dtype, weights in _FORMATS:
            for kv in _kv_formats(family):
                options = {"dtype": dtype, "quantization": weights, "kv_cache_dtype": kv}
                cases.append(Case(f"cpu/{index % 2}", family, options))
    cases += _special_cases()
    for index, family in enumerate((*FAMILIES, "llama-gptq")):
        for name, layout in LAYOUTS.items():
            if "enable_expert_parallel" in layout and not _has_experts(family):
                continue
            for dtype, weights in (
                ("float32", "none"),
                ("bfloat16", "none"),
                ("bfloat16", "int8"),
                ("float32", "int4"),
            ):
                options = {**layout, "dtype": dtype, "quantization": weights, "distributed_executor_backend": "threads"}
                # The largest layouts have one format each.
                if name not in ("tp3", "tp2 pp2", "tp2 dp2 ep") or (dtype, weights) == _FORMATS[index % 6]:
                    cases.append(Case(f"layouts/{index % 2}", family, options, "short"))
    for isa in ISAS:
        for family in FAMILIES:
            for dtype, weights in _FORMATS:
                kv = _kv_formats(family)[-1] if weights == "int8" else "auto"
                options = {"dtype": dtype, "quantization": weights, "kv_cache_dtype": kv}
                cases.append(Case(f"isa:{isa}", family, options))
    return cases


def _kv_formats(family: str) -> tuple[str, ...]:
    """What the KV cache may hold on the CPU."""
    return ("auto",) if family.startswith("deepseek") else ("auto", "int8")


def _has_experts(family: str) -> bool:
    return family.startswith("deepseek") or family.endswith("_moe") or family == "mixtral"


def _special_cases() -> list[Case]:
    """Variants of the families, long prompts with wide layers, dummy weights, checks for NaN."""
    from tests.models.checkpoints import FAMILIES, VARIANTS

    cases = []
    for name, variant in VARIANTS.items():
        if name in FAMILIES:
            continue
        # Lengths that matter to the rope scaling are the variant's own.
        matters = variant.prompt_len != 40 or "dynamic" in name
        for dtype, weights in (("float32", "none"), ("bfloat16", "int8")):
            options = {"dtype": dtype, "quantization": weights, "max_model_len": variant.prompt_len if matters else 60}
            cases.append(Case("cpu/2", name, options, "short"))
    for family in ("llama", "gemma2", "mixtral", "gpt2", "deepseek_v3"):
        for dtype, weights in _FORMATS:
            for kv in _kv_formats(family):
                options = {"dtype": dtype, "quantization": weights, "kv_cache_dtype": kv}
                sizes = {"block_size": 16, "max_num_batched_tokens": 384}
                cases.append(Case("cpu/2", f"{family}+long", {**options, **sizes}, "long"))
    for family in ("llama", "mixtral", "deepseek_v3"):
        for extra in ({"load_format": "dummy"}, {"check_finite": True}, {"enable_prefix_caching": False}):
            cases.append(Case("cpu/2", family, {"dtype": "bfloat16", "quantization": "int8", **extra}))
    return cases


def _gpu_cases() -> list[Case]:
    cases = []
    for checkpoint, dtype, weights, kv in GPU_CASES:
        options: dict[str, Any] = {"dtype": dtype, "quantization": weights, "kv_cache_dtype": kv}
        cases.append(Case(f"triton/{len(cases) % 2}", f"{checkpoint}+2-layers", options, "few"))
    for checkpoint, dtype, weights in GPU_ROWS:
        options = {"dtype": dtype, "quantization": weights, "max_num_batched_tokens": 256}
        cases.append(Case(f"triton/{len(cases) % 2}", f"{checkpoint}+2-layers", options, "rows"))
    for checkpoint, dtype, layout in GPU_LAYOUTS:
        options = {"dtype": dtype, "distributed_executor_backend": "threads", **LAYOUTS[layout]}
        cases.append(Case(f"triton/{len(cases) % 2}", f"{checkpoint}+2-layers", options, "few"))
    return sorted(cases, key=lambda case: case.group)


def make_checkpoint_of(name: str, folder: Path) -> None:
    """Save the checkpoint that a case names: a variant of tests/models/checkpoints.py, perhaps longer or packed."""
    from tests.loader.packer import pack_checkpoint
    from tests.models.checkpoints import make_variant
    from transformers.utils import logging

    logging.disable_progress_bar()
    overrides: dict[str, Any] = {}
    if name.endswith("+2-layers"):
        overrides["num_hidden_layers"] = 2
        name = name.removesuffix("+2-layers")
    if name.endswith("+long"):
        name = name.removesuffix("+long")
        overrides = LONG_SHAPES.get(name, _LONG)
    family, _, method = name.rpartition("-")
    if method not in PACKED:
        make_variant(name, folder, **overrides)
        return
    with tempfile.TemporaryDirectory() as scratch:
        # An intermediate size of whole groups, and few layers: the packer goes number by number.
        shape = {"num_hidden_layers": 2, **overrides, "intermediate_size": 128}
        plain = make_variant(family, Path(scratch) / "whole", **shape)
        pack_checkpoint(plain, folder, Path(scratch) / "plain", PACKED[method])


# ── Requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11, "logprobs": 3},
    {"temperature": 0.8, "seed": 12, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
    {"temperature": 1.3, "seed": -3, "min_p": 0.05, "frequency_penalty": 0.7, "presence_penalty": 0.2},
]


def _batch(lengths: Sequence[int], max_tokens: int, samplings: Sequence[dict[str, Any]] = SAMPLINGS) -> list[Any]:
    """Requests with prompts of these lengths, which begin alike in pairs; the samplings take turns."""
    from shardline import SamplingParams
    from shardline.types import Request

    rng = random.Random(7)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(max(lengths))]
    requests = []
    for index, length in enumerate(lengths):
        prompt = shared[: length // 2] if index % 2 else []
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(length - len(prompt))]
        sampling = {"max_tokens": max_tokens, "logits_digest": True, **samplings[index % len(samplings)]}
        requests.append(
            Request(
                request_id=f"r{index}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(**sampling),
                choice=index % 3,
                eos_token_ids=(3,),
            )
        )
    return requests


_NO_DIGEST: list[dict[str, Any]] = [{"temperature": 0.0, "logits_digest": False}]
"""If all rows of a step are greedy and nobody asks for logits, the engine computes the best column only."""

REQUESTS: dict[str, Callable[[], list[list[Any]]]] = {
    "mixed": lambda: [_batch([10, 37, 23, 52, 61, 5, 120, 18], 16), _batch([12, 30], 12, _NO_DIGEST)],
    "short": lambda: [_batch([7, 20, 24, 13, 11], 10), _batch([12, 22], 8, _NO_DIGEST)],
    "long": lambda: [_batch([700, 560, 40], 8), _batch([530], 6, _NO_DIGEST)],
    "few": lambda: [_batch([18, 7, 5], 3), _batch([9], 3, _NO_DIGEST)],
    "rows": lambda: [_batch([70], 2), _batch([66], 2, _NO_DIGEST)],
}
"""Batches by name; a batch begins when the one before has ended."""


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _answer(outputs: Sequence[Any], finish_reason: str | None) -> Record:
    """What is recorded of one request; `outputs` have token_ids, digests and logprobs of some of its steps each."""
    digests = [digest for output in outputs for digest in output.digests or []]
    logprobs = [
        (one.logprob, one.rank, list(one.top_ids), list(one.top_logprobs))
        for output in outputs
        for one in output.logprobs or []
    ]
    return {
        "tokens": " ".join(str(token) for output in outputs for token in output.token_ids),
        "digests": digests and [digests[0][:16], _hash(digests)],
        "logprobs": logprobs and _hash(logprobs),
        "finish": finish_reason,
    }


def run_batch(engine: RunningEngine, requests: Sequence[Any]) -> dict[str, Record]:
    """All requests to their end, together."""
    outputs: dict[str, list[Any]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.is_busy():
        for output in engine.step():
            assert not output.error, output.error
            outputs[output.request_id].append(output)
    return {
        request_id: _answer(parts, next((part.finish_reason for part in parts if part.finish_reason), None))
        for request_id, parts in outputs.items()
    }


def run_case(case: Case, folder: Path) -> Record:
    """The record of a case; a configuration that is refused is recorded as such."""
    defaults = {"cpu_threads": 1, "block_size": 4, "max_num_batched_tokens": 24, "step_timeout": 120.0}
    room = {"kv_cache_memory": 32 << 20, "device": "cpu"}
    executor = {"distributed_executor_backend": "uni"}
    options = {"model": str(folder / case.checkpoint), **defaults, **room, **executor, **case.options}
    batches = REQUESTS[case.requests]()
    if case.group == "llm":
        return _run_llm(options, batches)
    try:
        engine = start_engine(options)
    except ValueError as error:
        print(f"refused: {case.name}: {error}", file=sys.stderr)
        return {"refused": True}
    try:
        return {f"batch{number}": run_batch(engine, batch) for number, batch in enumerate(batches)}
    finally:
        engine.close()


def _run_llm(options: dict[str, Any], batches: Sequence[Sequence[Any]]) -> Record:
    """Through the public class, which starts processes; records the system fingerprint too."""
    from shardline import LLM

    options = {**options, "distributed_executor_backend": "auto"}
    with LLM(**options) as llm:
        record: Record = {"fingerprint": llm.fingerprint}
        for number, batch in enumerate(batches):
            prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in batch]
            outputs = llm.generate(prompts, [request.sampling for request in batch], use_tqdm=False)
            record[f"batch{number}"] = {
                f"r{index}": _answer(output.outputs, output.outputs[0].finish_reason)
                for index, output in enumerate(outputs)
            }
    return record


# ── Processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_group(group: str, only: str, folder: Path, out: Path) -> None:
    """All cases of a group, in this process."""
    # Ranks that are threads hand the interpreter over at every exchange.
    sys.setswitchinterval(1e-4)
    if group.startswith("triton"):
        use_gpu_kernels()
    cases = [case for case in make_cases() if case.group == group and only in case.name]
    records = {}
    for number, case in enumerate(cases, 1):
        started = time.perf_counter()
        records[case.name] = run_case(case, folder)
        seconds = time.perf_counter() - started
        print(f"[{group} {number}/{len(cases)}] {case.name}: {seconds:.2f} s", file=sys.stderr, flush=True)
    out.write_text(json.dumps(records))


def _start_group(group: str, only: str, folder: Path) -> dict[str, Record]:
    out = folder / f"{group.replace('/', '-').replace(':', '-')}.json"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SHARDLINE_", "TRITON_"))}
    environment["PYTHONPATH"] = str(ROOT / "src")
    environment["PYTHONWARNINGS"] = "ignore"
    if group.startswith("isa:"):
        environment["SHARDLINE_ISA"] = group.removeprefix("isa:")
    if group.startswith("triton"):
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, __file__, "--group", group, "--folder", str(folder), "--only", only, str(out)]
    subprocess.run(command, env=environment, check=True)
    return dict(json.loads(out.read_text()))


def describe_machine() -> str:
    """The CPU's name and the versions of the libraries on which the records depend."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "triton", "numpy")]
    return ", ".join([names[0] if names else platform.machine(), *versions])


def record(out: Path, only: str, jobs: int) -> None:
    """Make the checkpoints, run every group in a process of its own, `jobs` at a time, and write the records."""
    started = time.perf_counter()
    cases = [case for case in make_cases() if only in case.name]
    assert len({case.name for case in cases}) == len(cases), "two cases have one name"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in dict.fromkeys(case.checkpoint for case in cases):
            make_checkpoint_of(name, folder / name)
        print(f"checkpoints: {time.perf_counter() - started:.0f} s", file=sys.stderr)
        groups = list(dict.fromkeys(case.group for case in cases))
        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(functools.partial(_start_group, only=only, folder=folder), groups))
    records = {name: one for result in results for name, one in result.items()}
    seconds = time.perf_counter() - started
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in records.items())
    out.write_text(f'{{"machine": {json.dumps(describe_machine())}, "cases": {{\n{lines}\n}}}}\n')
    print(f"{len(records)} cases in {seconds:.0f} s: {out}", file=sys.stderr)


def compare(first: Path, second: Path, only: str) -> int:
    """Print what differs between two files of records in the cases whose name has `only`; the exit status."""
    one, other = json.loads(first.read_text()), json.loads(second.read_text())
    if one["machine"] != other["machine"]:
        print(f"not the same machine or libraries:\n{one['machine']}\n{other['machine']}")
    names = sorted(name for name in one["cases"].keys() | other["cases"].keys() if only in name)
    differing = 0
    for name in names:
        ours, theirs = one["cases"].get(name), other["cases"].get(name)
        if ours == theirs:
            continue
        differing += 1
        if ours is None or theirs is None:
            print(f"{name}: only in {first if theirs is None else second}")
            continue
        paths = [path for path, values in _flat(ours, theirs) if values[0] != values[1]]
        print(f"{name}: {', '.join(paths[:6])}{' …' if len(paths) > 6 else ''}")
    print(f"{differing} of {len(names)} cases differ" if differing else f"{len(names)} cases agree")
    return 1 if differing else 0


def _flat(one: Any, other: Any, path: str = "") -> list[tuple[str, tuple[Any, Any]]]:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [(path or "all", (one, other))]
    keys = dict.fromkeys((*one, *other))
    return [item for key in keys for item in _flat(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--compare", action="store_true", help="compare two recorded files")
    parser.add_argument("--only", default="", help="record or compare only the cases whose name has this text")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compare:
        if len(arguments.files) != 2:
            parser.error("--compare takes two files")
        return compare(arguments.files[0], arguments.files[1], arguments.only)
    if len(arguments.files) != 1:
        parser.error("one file to write is needed")
    if arguments.group:
        run_group(arguments.group, arguments.only, arguments.folder, arguments.files[0])
    else:
        record(arguments.files[0], arguments.only, arguments.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
