"""Records what the engine answers, bit by bit, so that two states of the code can be compared.

    python scripts/record_digests.py OUT.json                  # record
    python scripts/record_digests.py --compare A.json B.json   # exit 1 if anything differs

A case is a checkpoint with engine options. Its record has, for every request, the tokens, a hash of the digests of the
fp32 logits of every step, a hash of the log-probabilities, and the finish reason. The cases cover every model
family in float32 and bfloat16 with every weight format and KV format of the CPU, packed checkpoints, layouts of
several ranks (as threads), every instruction set of this CPU, and the GPU's kernels in Triton's interpreter.
Run it from anywhere with the test extras installed; it imports `shardline` from src/ and `tests` from this checkout.

The engines run in this script's own processes, since one process per case would take too long. Only
scripts/digests/engines.py uses functions of the engine that are not public.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from scripts.digests.cases import make_cases, make_checkpoint_of
from scripts.digests.engines import use_gpu_kernels
from scripts.digests.requests import Record, run_case

ROOT = Path(__file__).resolve().parent.parent


def run_group(group: str, only: str, folder: Path, out: Path) -> None:
    """Run all cases of a group in this process."""
    # Ranks that are threads pass the interpreter lock to each other at every exchange.
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
    """Print the differences of two records, for cases whose name contains `only`; returns the exit status."""
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
