"""Everything that only a GPU can show, in three calls of under nine minutes: `python perf/gpu/all.py`, then
`python perf/gpu/all.py --parts ceilings,families`, then `python perf/gpu/all.py --parts
ceilings,engine,layouts`.

It needs the built kernels (`make dev`, PYTHONPATH=src) and a CUDA torch with Triton. Each part has its own process and
time limit, so a part that fails or hangs does not hide the others.

The first call measures the GPU's ceilings. It compares every Triton kernel with its oracle, and checks that a row's
bits do not depend on the batch. It compares the demo model with the CPU, and checks that no launch of a step waits. It
measures the kernels, the library's products and the cost of exact numerics. The second call checks and times experts,
latent attention and quantization. The third call measures the engine against its bars, and checks that several ranks on
one GPU answer like one rank.

It prints one JSON object (with --output, also to a file), then a table. `--interpret` checks the kernels on the CPU, at
small sizes, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_LIMITS = {
    "ceilings": 45,
    "checks": 120,
    "tokens": 90,
    "kernels": 135,
    "library": 150,
    "families": 420,
    "engine": 175,
    "layouts": 300,
}
"""Seconds of each part."""
_FIRST_CALL = ("ceilings", "checks", "tokens", "kernels", "library")
"""540 seconds in all; `--parts ceilings,families` (465) and `--parts ceilings,engine,layouts` (520) are the others."""


def measure_ceilings() -> dict[str, Any]:
    """Bytes a second of a large copy, read plus written, and FLOP a second of a large bf16 product of random data."""
    import torch

    def fastest(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(13):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return sorted(times[3:])[len(times[3:]) // 2]

    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / fastest(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    flops = 2 * 8192**3 / fastest(lambda: torch.mm(a, b, out=out))
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "copy_bytes_per_s": copy,
        "flops": flops,
    }


def run_part(name: str, device: str, ceilings: dict[str, float]) -> Any:
    """Run one part in this process."""
    if name == "ceilings":
        return measure_ceilings()
    if name == "checks":
        from perf.gpu import checks

        return checks.run(device)
    if name == "kernels":
        from perf.gpu import kernel_times

        return kernel_times.run(ceilings)
    if name == "families":
        from perf.gpu import families

        return families.run(ceilings)
    if name == "library":
        from perf.gpu import library

        return library.run(ceilings)
    if name == "layouts":
        from perf.gpu import layouts

        return layouts.run("cuda")
    from perf.gpu import engine

    return engine.same_tokens() if name == "tokens" else engine.run(ceilings)


def run_in_process(name: str, device: str, ceilings: dict[str, float]) -> dict[str, Any]:
    """Run a part in its own process; returns {"seconds", and "result" or "error"}."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])}
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, __file__, "--part", name, "--device", device, "--ceilings", json.dumps(ceilings)]
        outcome: dict[str, Any] = {}
        try:
            done = subprocess.run(
                [*command, "--output", str(answer)], env=environment, timeout=_LIMITS[name], stdout=sys.stderr
            )
            if done.returncode != 0:
                outcome["error"] = f"ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            outcome["error"] = f"not finished in {_LIMITS[name]} s"
        if answer.exists():
            outcome["result"] = json.loads(answer.read_text())
    return {**outcome, "seconds": round(time.perf_counter() - started, 1)}


def has_failed(result: Any) -> bool:
    """Whether a result contains a failure, a value that is not ok, or a traceback. A missed bar is not a failure."""
    if isinstance(result, dict):
        told = bool(result.get("failed")) or result.get("ok") is False
        return told or any(has_failed(one) for one in result.values())
    return isinstance(result, str) and result.startswith("Traceback")


def rows_of(value: Any, path: str = "") -> list[str]:
    """The lines of a result: one for each leaf, and one for an entry that holds only numbers."""
    if isinstance(value, dict) and value and any(isinstance(one, dict) for one in value.values()):
        return [row for name, one in value.items() for row in rows_of(one, f"{path} / {name}" if path else name)]
    if isinstance(value, dict):
        parts = [f"{name} {one:.4g}" if isinstance(one, float) else f"{name} {one}" for name, one in value.items()]
        return [f"{path:<46} {'  '.join(parts)}"]
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return [f"{path:<46} {text.strip().splitlines()[-1] if text.strip() else text}"]


def main() -> int:
    """See the docstring of this module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--interpret", action="store_true", help="check kernels on the CPU instead, at small sizes")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    parser.add_argument("--parts", default=",".join(_FIRST_CALL), help="only these (default: %(default)s)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--ceilings", type=json.loads, default={}, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        args.output.write_text(json.dumps(run_part(args.part, args.device, args.ceilings)))
        return 0
    import torch

    if not args.interpret and not torch.cuda.is_available():
        print("no CUDA device: run this on a machine with a GPU, or with --interpret", file=sys.stderr)
        return 2
    parts = ["checks"] if args.interpret else args.parts.split(",")
    report: dict[str, Any] = {}
    ceilings: dict[str, float] = {}
    for name in parts:
        report[name] = run_in_process(name, "cpu" if args.interpret else "cuda", ceilings)
        if name == "ceilings":
            ceilings = report[name].get("result", {"copy_bytes_per_s": float("nan"), "flops": float("nan")})
        print(f"{name}: {report[name]['seconds']} s", file=sys.stderr)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))
    for name, part in report.items():
        print(f"\n== {name} ({part['seconds']} s) {part.get('error', '')}")
        print("\n".join(rows_of(part.get("result", {}))))
    failed = [name for name, part in report.items() if "error" in part or has_failed(part["result"])]
    print(f"\nparts that failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
