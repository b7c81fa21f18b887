"""How fast checkpoints load from storage, against `dd` of the same files: `python -m perf.loading`.

It writes random checkpoints once (perf/format_models.py), or takes `--models`. In each round, each is read
by `dd` and loaded by one rank, in turns. Its pages are dropped from the page cache before each. It prints the rates and
their ratio, as the median of the rounds with the least and the most. It also prints the bytes that storage has
delivered, and the peak memory beyond 0.25 GB as a multiple of the packed bytes.

A virtual machine may return free memory to its host, and then the first touch of each page is slow, in `dd` too. So
`--held` bytes are touched and freed before each measurement: both find memory that the machine has.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from perf.format_models import FORMATS, checkpoint

_TORCH_BYTES = 0.25e9
_HUGE_PAGE = 2 << 20


def files_of(model: Path) -> list[Path]:
    """The weight files of a checkpoint."""
    return [model] if model.is_file() else sorted(model.glob("*.safetensors"))


def prepare(files: Sequence[Path], held: int) -> None:
    """Drop the files from the page cache, and touch and free memory."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    if held:
        with mmap.mmap(-1, held, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            for place in range(0, held, _HUGE_PAGE):
                memory[place] = 1


def time_dd(files: Sequence[Path], held: int) -> float:
    """Seconds in which `dd` reads the files."""
    prepare(files, held)
    began = time.perf_counter()
    for file in files:
        subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=16M", "status=none"], check=True)
    return time.perf_counter() - began


def load(model: Path, threads: int, held: int) -> None:
    """Load a checkpoint in this process as the engine does, and print figures as JSON."""
    from shardline.config.engine import EngineConfig
    from shardline.deployment.here import resolve_here
    from shardline.engine.executor.uni import UniExecutor

    options = {"model": str(model), "max_model_len": 512, "kv_cache_memory": "64MiB", "cpu_threads": threads}
    deployment = resolve_here(EngineConfig.from_options(**options))
    prepare(files_of(model), held)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = _read_bytes()
    (report,) = UniExecutor(deployment, 0).start()
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    figures = {"seconds": report.load_seconds, "packed": report.weight_bytes, "peak": peak}
    print(json.dumps({**figures, "read": _read_bytes() - before}))


def _read_bytes() -> int:
    """Bytes that storage has delivered to this process."""
    return int(Path("/proc/self/io").read_text().split("read_bytes:")[1].split()[0])


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}-{max(values):.2f}]"


def measure(model: Path, options: argparse.Namespace) -> None:
    """Measure one checkpoint and print its line."""
    files = files_of(model)
    size = sum(file.stat().st_size for file in files)
    command = [sys.executable, "-m", "perf.loading", "--load", str(model)]
    command += ["--threads", str(options.threads), "--held", str(options.held)]
    dd, loads, ratios, figures = [], [], [], {}
    for _ in range(options.rounds):
        dd.append(size / time_dd(files, options.held) / 1e9)
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        figures = json.loads(output.splitlines()[-1])
        loads.append(size / figures["seconds"] / 1e9)
        ratios.append(loads[-1] / dd[-1])
    peak = (figures["peak"] - _TORCH_BYTES) / figures["packed"]
    print(
        f"{model.name}: {size / 1e9:.2f} GB, dd {_spread(dd)} GB/s, load {_spread(loads)} GB/s, "
        f"ratio {_spread(ratios)}; {figures['read'] / 1e9:.2f} GB read; "
        f"peak {peak:.2f} x {figures['packed'] / 1e9:.2f} GB packed",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/formats"), help="where checkpoints are written")
    parser.add_argument("--shape", default="llama1b")
    parser.add_argument("--forms", nargs="+", choices=FORMATS, default=("bf16", "fp8", "q4_k_m"))
    parser.add_argument("--models", nargs="+", type=Path, default=(), help="checkpoints to measure instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--held", type=float, default=0, help="bytes to touch and free before each measurement")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.held = int(options.held) // _HUGE_PAGE * _HUGE_PAGE
    if options.load is not None:
        load(options.load, options.threads, options.held)
        return
    for model in options.models or [checkpoint(options.folder, options.shape, form) for form in options.forms]:
        measure(model, options)


if __name__ == "__main__":
    main()
